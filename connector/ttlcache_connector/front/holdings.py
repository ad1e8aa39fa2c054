"""Which programs one replica holds: asked seldom, and once at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from ttlcache.clock import Clock

#: Names kept of one answer; vLLM's own has 200 an engine.
MAX_NAMES = 10_000


class Holdings:
    """The programs of one replica, as it told them a moment ago.

    A replica is asked when it is overloaded, and a rollout begins many sub-agents at
    once: what it said is good for all of them.

    Args:
        ask: the names of its programs; none where it does not answer.
        max_age_s: how long an answer is believed, one of none, too.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[frozenset[str]]],
        clock: Clock,
        max_age_s: float,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._max_age_s = max_age_s
        self._names: frozenset[str] = frozenset()
        self._asked_s: float | None = None
        # Whoever waits for it finds the answer there; if the one that asks is
        # cancelled, because its client left, the next one does.
        self._asking = anyio.Lock()

    async def has(self, program: str) -> bool:
        async with self._asking:
            if not self._fresh():
                self._names = await self._ask()
                self._asked_s = self._clock.now_s()
        return program in self._names

    def _fresh(self) -> bool:
        if self._asked_s is None:
            return False
        return 0.0 <= self._clock.now_s() - self._asked_s < self._max_age_s
