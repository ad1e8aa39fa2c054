"""Prefix-cache look-ups that are not repeated while they cannot have changed.

vLLM looks the head of the queue up again at every step that has no room for it,
thousands of blocks each time. The answer changes only when a block of that very
program, or of all, is cached or evicted, and here a hash tells whose it is. Results are
the same to the byte (`tests/bench/test_sim_engine.py` compares); cells take half the
time. Scheduler overhead is measured elsewhere, without this.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from ttlcache_sim.load.agents import OWNER_BYTES

#: The owner of what all programs begin with.
NOBODY = bytes(OWNER_BYTES)


class _VersionedMap(BlockHashToBlockMap):
    """Counts the changes per program."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.versions: defaultdict[bytes, int] = defaultdict(int)

    def insert(self, key: Any, block: Any) -> None:
        self.versions[key[:OWNER_BYTES]] += 1
        super().insert(key, block)

    def pop(self, key: Any, block_id: int) -> Any:
        self.versions[key[:OWNER_BYTES]] += 1
        return super().pop(key, block_id)


def remember_lookups(manager: KVCacheManager) -> None:
    """Shadow `get_computed_blocks` of this one manager; call before any request."""
    pool = manager.block_pool
    table = _VersionedMap()
    pool.cached_block_hash_to_block = table
    look_up = manager.get_computed_blocks
    remembered: dict[bytes, tuple[Any, Any]] = {}

    def get_computed_blocks(request: Request, *bound: Any) -> Any:
        # `bound`: since 0.33, an upper bound of the hit.
        hashes = request.block_hashes
        if not hashes:
            return look_up(request, *bound)
        owner = hashes[-1][:OWNER_BYTES]
        version = (
            request.request_id,
            request.num_tokens,
            bound,
            table.versions[owner],
            table.versions[NOBODY],
        )
        known = remembered.get(owner)
        if known is None or known[0] != version:
            known = remembered[owner] = (version, look_up(request, *bound))
        return known[1]

    manager.get_computed_blocks = get_computed_blocks  # type: ignore[method-assign]
