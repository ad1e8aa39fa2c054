"""For tests of code built on ttlcache: a fake engine, and suites for contracts.

`ttlcache.testing.policy_contract` is imported by name: it needs more than this.
"""

from __future__ import annotations

from ttlcache.testing.fake_engine import FakeEngine, FakeRequest, chain_hashes
from ttlcache.testing.fake_holder import FakeHolder

__all__ = ["FakeEngine", "FakeHolder", "FakeRequest", "chain_hashes"]
