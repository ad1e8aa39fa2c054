"""LMCache's L1 and eviction loop in virtual time, with LMCache's policies or our tier.

What is modelled: whole chunks, a look at the watermark every second, stores that are
dropped when nothing is free, and that begin where the lookup's hit ended, as those of
LMCache's connectors do: what is evicted while its request runs is not written again.
LMCache drops a whole store that does not fit; here what fits is kept, for stock, too.
The engine may have a prefix cache of its own; what it has, no L1 serves.
The policies are LMCache's own objects and our `Tier`.
Serving a turn takes `service_s`; the gaps are the workload's.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.config import EvictionConfig
from lmcache.v1.distributed.eviction_policy import CreateEvictionPolicy

from bench.serve.replay import ReplayOptions, new_token_ids
from ttlcache.clock import VirtualClock
from ttlcache_lmcache.config import ServerModuleConfig
from ttlcache_lmcache.retention.l1_tier import Tier
from ttlcache_lmcache.retention.residency import chunk_of
from ttlcache_sim.load.programs import Program

_WATERMARK, _RATIO = 0.8, 0.2  # LMCache's defaults


@dataclass(slots=True)
class SimResult:
    """What one arm served."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    pool_tokens: int = 0
    dropped_chunks: int = 0
    turns: int = 0

    @property
    def prompt_hit(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class _Stock:
    """LMCache's policy behind its loop."""

    def __init__(self, name: str, l1: set[ObjectKey]) -> None:
        config = EvictionConfig(eviction_policy=name)
        self._policy = CreateEvictionPolicy(config)
        self._l1 = l1

    def lookup(self, request: str, keys: list[ObjectKey], tokens: int) -> None:
        self._policy.on_keys_touched([key for key in keys if key in self._l1])

    def admit(self, keys: list[ObjectKey], free: int) -> tuple[list[Any], list[Any]]:
        """What of `keys` is stored where so many fit, and what goes for it."""
        return keys[:free], []

    def written(self, keys: list[ObjectKey]) -> None:
        self._policy.on_keys_reserved(keys)
        self._policy.on_keys_created(keys)

    def ended(self, request: str, keys: list[ObjectKey]) -> None:
        self._policy.on_keys_touched(keys)

    def look(self, used: float, is_second: bool) -> list[ObjectKey]:
        if not is_second or used < _WATERMARK:
            return []
        actions = self._policy.get_eviction_actions(_RATIO, lambda _key: True)
        gone = [key for action in actions for key in action.keys]
        self._policy.on_keys_removed(gone)
        return gone


class _Ours:
    """Our tier behind the same loop."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    def lookup(self, request: str, keys: list[ObjectKey], tokens: int) -> None:
        self.tier.lookup(request, list(map(chunk_of, keys)), tokens)

    def admit(self, keys: list[ObjectKey], free: int) -> tuple[list[Any], list[Any]]:
        found = self.tier.admit(keys, True)
        self.tier.deleted(found.victims)
        return found.keys[: free + len(found.victims)], found.victims

    def written(self, keys: list[ObjectKey]) -> None:
        self.tier.reserved(keys)
        self.tier.written(keys)

    def ended(self, request: str, keys: list[ObjectKey]) -> None:
        self.tier.context(keys)
        self.tier.ended(request)

    def look(self, used: float, is_second: bool) -> list[Any]:
        return []


class EnginePool:
    """What the engine's own prefix cache has; the tail of a context goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free: OrderedDict[ObjectKey, None] = OrderedDict()  # next to go first
        self._used: Counter[ObjectKey] = Counter()

    def begin(self, keys: Sequence[ObjectKey]) -> int:
        """A request takes its blocks; how many of them were there, from the start."""
        if not self._capacity:
            return 0
        hits = len(list(itertools.takewhile(self._has, keys)))
        for key in keys:
            self._free.pop(key, None)
            self._used[key] += 1
        self._shrink()
        return hits

    def end(self, before: Sequence[ObjectKey], keys: Sequence[ObjectKey]) -> None:
        if not self._capacity:
            return
        self._used -= Counter(before)
        for key in reversed(keys):
            if key not in self._used:
                self._free.pop(key, None)
                self._free[key] = None
        self._shrink()

    def _has(self, key: ObjectKey) -> bool:
        return key in self._free or key in self._used

    def _shrink(self) -> None:
        while self._free and len(self._free) + len(self._used) > self._capacity:
            self._free.popitem(last=False)


class Simulation:
    """One arm over one workload."""

    def __init__(
        self, name: str, capacity: int, chunk_tokens: int, pool_chunks: int = 0
    ) -> None:
        """
        Args:
            capacity: of L1, in chunks.
            pool_chunks: of the engine's own prefix cache.
        """
        self._pool = EnginePool(pool_chunks)
        self._began: dict[str, list[ObjectKey]] = {}
        self.clock = VirtualClock()
        self.l1: set[ObjectKey] = set()
        self._hits: dict[str, int] = {}
        self.capacity = capacity
        self.chunk_tokens = chunk_tokens
        self.result = SimResult()
        self.arm: _Stock | _Ours = (
            _Ours(
                Tier(
                    ServerModuleConfig(),
                    self.clock,
                    usage=lambda: len(self.l1) / capacity,
                    is_evictable=lambda _key: True,
                )
            )
            if name == "ttl"
            else _Stock(name, self.l1)
        )

    def keys(self, tokens: Sequence[int]) -> list[ObjectKey]:
        digest, found = hashlib.blake2b(digest_size=16), []
        for end in range(self.chunk_tokens, len(tokens) + 1, self.chunk_tokens):
            part = tokens[end - self.chunk_tokens : end]
            digest.update(b",".join(b"%d" % token for token in part))
            found.append(ObjectKey(digest.digest(), "sim", 0))
        return found

    def begin(self, request: str, prompt: Sequence[int]) -> None:
        keys = self.keys(prompt)
        hits = next((i for i, k in enumerate(keys) if k not in self.l1), len(keys))
        self._hits[request] = hits
        self.result.turns += 1
        self.result.prompt_tokens += len(prompt)
        had = self._pool.begin(keys)
        self._began[request] = keys
        self.result.cached_tokens += max(hits, had) * self.chunk_tokens
        self.result.pool_tokens += had * self.chunk_tokens
        self.arm.lookup(request, keys, len(prompt))

    def end(self, request: str, context: Sequence[int]) -> None:
        keys = self.keys(context)
        self._pool.end(self._began.pop(request), keys)
        start = self._hits.pop(request)
        new = [key for key in keys[start:] if key not in self.l1]
        fit, gone = self.arm.admit(new, self.capacity - len(self.l1))
        self.l1.difference_update(gone)
        self.result.dropped_chunks += len(new) - len(fit)
        self.l1.update(fit)
        self.arm.written(fit)
        self.arm.ended(request, keys)

    def run(
        self, programs: Sequence[Program], seed: int, service_s: float
    ) -> SimResult:
        options = ReplayOptions(seed=seed)
        contexts: list[list[int]] = [[] for _ in programs]
        # (time, order, program, turn, phase); program -1 is the eviction loop.
        events = [(p.arrival_s, i, i, 0, 0) for i, p in enumerate(programs)]
        order, left = len(events), len(events)
        heapq.heapify(events)
        heapq.heappush(events, (0.25, order, -1, 1, 0))
        while left:
            at_s, _, which, turn, phase = heapq.heappop(events)
            self.clock.set(at_s)
            order += 1
            if which < 0:
                used = len(self.l1) / self.capacity
                self.l1.difference_update(self.arm.look(used, turn % 4 == 0))
                heapq.heappush(events, (at_s + 0.25, order, -1, turn + 1, 0))
                continue
            program, context = programs[which], contexts[which]
            step = program.turns[turn]
            request = f"{which}-{turn}"
            if phase == 0:
                context += new_token_ids(program.program_id, turn, step, options)
                self.begin(request, context)
                heapq.heappush(events, (at_s + service_s, order, which, turn, 1))
                continue
            context += [(turn * 31 + i) % 2000 for i in range(step.output_tokens)]
            self.end(request, context)
            if turn + 1 < len(program.turns):
                heapq.heappush(events, (at_s + step.gap_s, order, which, turn + 1, 0))
            else:
                left -= 1
        return self.result
