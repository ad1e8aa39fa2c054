"""Which lower tiers there are.

A new one: its own files, a line in `TIERS`, and in `ttlcache.config` its name and the
prefix of keys that it reads itself.
"""

from __future__ import annotations

from ttlcache_connector.tiers.base import TierFactory
from ttlcache_connector.tiers.cpu.tier import CPU
from ttlcache_connector.tiers.lmcache.tier import LMCache

#: By their names in `lower_tier`, of which `ttlcache.config` has the list.
TIERS: dict[str, TierFactory] = {
    "auto": TierFactory(),  # unresolved
    "none": TierFactory(),
    "cpu": CPU(),
    "lmcache": LMCache(),
}
