"""How far plain vLLM would be behind by now, for want of what pins spared.

What counts as saved is what plain vLLM's prefix cache would have evicted. The more it
prefills again, the later it is with everything else, and the more other work is done,
and takes memory, between a turn's end and its next turn. It catches up only while the
engine has nothing to do here.
"""

from __future__ import annotations

from ttlcache.clock import Clock


class Backlog:
    """Prefill that plain vLLM would still have before it, as `tokens`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.tokens = 0.0
        self._seconds = 0.0
        self._idle_from_s: float | None = clock.now_s()

    def on_saved(self, tokens: int, seconds: float) -> None:
        """A pin spared so much prefill."""
        self.tokens += tokens
        self._seconds += max(0.0, seconds)

    def on_busy(self) -> None:
        """A request arrives: what the engine was idle for is what plain vLLM needed."""
        if self._idle_from_s is None:
            return
        # A clock that is set back has not rested.
        idle_s = max(0.0, self._clock.now_s() - self._idle_from_s)
        self._idle_from_s = None
        left = 1.0 - min(1.0, idle_s / self._seconds) if self._seconds else 0.0
        self.tokens *= left
        self._seconds *= left

    def on_idle(self) -> None:
        """The last request left."""
        self._idle_from_s = self._clock.now_s()
