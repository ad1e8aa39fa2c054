"""What the server module's mind costs a turn, in CPU time, with many programs.

The tier as LMCache calls it, without LMCache: a full L1, shared system prompts, tools
with gaps of their own, programs that end and others that begin. Time is virtual; what
is measured is the thread's CPU time in each call, all of which hold the tier's lock.
"""

from __future__ import annotations

import gc
import heapq
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.lmcache.test_tier import Key
from ttlcache.clock import VirtualClock
from ttlcache_lmcache.config import ServerModuleConfig, load
from ttlcache_lmcache.hints import Hint
from ttlcache_lmcache.retention.l1_tier import Tier

#: Mean seconds of a tool's gaps.
TOOLS = {f"tool{i}": 2.0 * 1.5**i for i in range(8)}
SYSTEM_PROMPTS, SHARED_CHUNKS, FIRST_CHUNKS, MOST_CHUNKS = 5, 8, 12, 32
SERVICE_S = 1.0


@dataclass(slots=True)
class Agent:
    chain: list[Key]
    request: str = ""


class TierLoad:
    """`programs` agents in turn; L1 has room for half of what they hold.

    Args:
        has_l2: whether stores may be refused.
    """

    def __init__(self, programs: int, seed: int = 0, has_l2: bool = False) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock(1000.0)
        self.capacity = programs * 8
        self.l1: dict[Key, None] = {}
        self.has_l2 = has_l2
        config = load(ServerModuleConfig, {"max_programs": 100_000}, "load")
        self.tier = Tier(config, self.clock, self.used, lambda _key: True)
        self.cpu_s: dict[str, list[float]] = defaultdict(list)
        self.hits = self.wanted = 0
        self._numbers = 0
        self._events: list[tuple[float, int, Agent, bool]] = []
        for index in range(programs):
            at_s = 1000.0 + self.rng.random() * 30.0
            agent = self.agent()
            self.grow(agent, self.rng.randrange(MOST_CHUNKS - FIRST_CHUNKS))
            self._events.append((at_s, index, agent, False))
        self._order = programs
        heapq.heapify(self._events)

    def used(self) -> float:
        return len(self.l1) / self.capacity

    def agent(self) -> Agent:
        self._numbers += 1
        shared = self._numbers % SYSTEM_PROMPTS
        chain = [Key(b"s%d/%d" % (shared, i)) for i in range(SHARED_CHUNKS)]
        agent = Agent(chain)
        self.grow(agent, FIRST_CHUNKS - SHARED_CHUNKS)
        return agent

    def grow(self, agent: Agent, chunks: int) -> None:
        for _ in range(chunks):
            self._numbers += 1
            agent.chain.append(Key(b"%032d" % self._numbers))

    def timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        began_ns = time.thread_time_ns()
        result = call(*args)
        self.cpu_s[name].append((time.thread_time_ns() - began_ns) / 1e9)
        return result

    def run(self, turns: int) -> None:
        """So many turns more."""
        gc.collect()
        gc.disable()  # whose pass it is that a call sets off is chance
        done = 0
        while done < turns:
            at_s, _, agent, is_end = heapq.heappop(self._events)
            self.clock.set(at_s)
            if is_end:
                self.end(agent)
                done += 1
                continue
            self.begin(agent)
            self.push(at_s + SERVICE_S, agent, True)
        gc.enable()

    def push(self, at_s: float, agent: Agent, is_end: bool) -> None:
        self._order += 1
        heapq.heappush(self._events, (at_s, self._order, agent, is_end))

    def begin(self, agent: Agent) -> None:
        self._numbers += 1
        agent.request = f"r{self._numbers}"
        hashes = [key.chunk_hash for key in agent.chain]
        tier, tokens = self.tier, len(hashes) * 256
        self.timed("lookup", tier.lookup, agent.request, "m", hashes, tokens)
        found = 0
        for key in agent.chain:
            if key not in self.l1:
                break
            found += 1
        self.hits += found
        self.wanted += len(hashes)
        self.timed("context", tier.context, agent.chain[:found])
        self.store(agent.chain[found:])

    def store(self, keys: list[Key]) -> None:
        admit = self.tier.admit
        found = self.timed("admit", admit, keys, not self.has_l2)
        self.delete(found.victims)
        free = self.capacity - len(self.l1)
        new = [key for key in found.keys if key not in self.l1][: max(free, 0)]
        self.l1.update(dict.fromkeys(new))
        self.timed("reserved", self.tier.reserved, new)
        self.timed("written", self.tier.written, new)

    def delete(self, keys: list[Key]) -> None:
        for key in keys:
            self.l1.pop(key, None)
        self.timed("deleted", self.tier.deleted, keys)

    def end(self, agent: Agent) -> None:
        output = len(agent.chain)
        self.grow(agent, self.rng.choice((1, 1, 2)))
        self.store(agent.chain[output:])
        is_last = len(agent.chain) >= MOST_CHUNKS
        tool = self.rng.choice(list(TOOLS))
        if self.rng.random() < 0.8:
            hint = Hint(request_id=agent.request, tool=(tool,), is_last_step=is_last)
            self.timed("hint", self.tier.hint, hint)
        self.timed("ended", self.tier.ended, agent.request)
        self.timed("context", self.tier.context, list(agent.chain))
        if is_last:
            agent = self.agent()
        else:
            self.grow(agent, self.rng.choice((0, 1)))
        gap_s = self.rng.expovariate(1.0 / TOOLS[tool])
        self.push(self.clock.now_s() + gap_s, agent, False)


def percentile_s(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]
