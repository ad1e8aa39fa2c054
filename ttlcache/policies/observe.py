"""Decides as `adaptive` and pins nothing: what would retention save here?

The controller keeps its pins in tables alone (`ttlcache.retention.shadow`), and serves
requests in vLLM's own order.
"""

from __future__ import annotations

from ttlcache.policies.adaptive import Adaptive


class Observe(Adaptive):
    """`adaptive`, without any effect."""

    name = "observe"
