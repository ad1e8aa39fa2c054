"""What an eviction could serve from L1 that knows every lookup to come.

Belady's rule by chunk: when a turn's chunks are written, those stay that are looked up
soonest, prefix before tail. Nothing is dropped, and nothing kept free. It is no strict
bound: it may keep a tail whose prefix it gave up.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from lmcache.v1.distributed.api import ObjectKey

from bench.lmcache.sim import SimResult, Simulation
from bench.serve.replay import ReplayOptions, new_token_ids
from ttlcache_sim.load.programs import Program


class Oracle(Simulation):
    """A simulation whose L1 is filled in hindsight."""

    def __init__(self, capacity: int, chunk_tokens: int) -> None:
        super().__init__("LRU", capacity, chunk_tokens)
        self._lookups_s: dict[ObjectKey, list[float]] = {}
        self._depth: dict[ObjectKey, int] = {}

    def end(self, request: str, context: Sequence[int]) -> None:
        keys = self.keys(context)
        start = self._hits.pop(request)
        self._depth.update((key, depth) for depth, key in enumerate(keys))
        ranked = sorted(
            self.l1.union(keys[start:]),
            key=lambda key: (self._next_s(key), self._depth[key]),
        )
        best = ranked[: self.capacity]
        self.l1 = {key for key in best if self._next_s(key) < math.inf}

    def run(
        self, programs: Sequence[Program], seed: int, service_s: float
    ) -> SimResult:
        for program in programs:
            self._note_lookups(program, seed, service_s)
        for times in self._lookups_s.values():
            times.sort()
        self.arm.look = lambda used, is_second: []  # type: ignore[method-assign]
        return super().run(programs, seed, service_s)

    def _note_lookups(self, program: Program, seed: int, service_s: float) -> None:
        """When a turn begins does not depend on what is found."""
        options = ReplayOptions(seed=seed)
        at_s, context = program.arrival_s, list[int]()
        for index, turn in enumerate(program.turns):
            context += new_token_ids(program.program_id, index, turn, options)
            for key in self.keys(context):
                self._lookups_s.setdefault(key, []).append(at_s)
            context += [(index * 31 + i) % 2000 for i in range(turn.output_tokens)]
            at_s += service_s + turn.gap_s

    def _next_s(self, key: ObjectKey) -> float:
        times = self._lookups_s.get(key, [])
        index = bisect.bisect_right(times, self.clock.now_s())
        return times[index] if index < len(times) else math.inf
