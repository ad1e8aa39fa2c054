"""What plain vLLM would give memory to before a request that continues a turn.

What counts as saved is what plain vLLM's prefix cache would have evicted by then, for
the sake of other requests: those that got their blocks here, and two kinds more. Plain
vLLM serves in the order of arrival, so also those that came earlier and still wait
here. And what it prefills again makes it late, until it catches up while nothing waits
here. That counts up to the contexts of all programs under way, as each has a request
before this one at most.
"""

from __future__ import annotations

from ttlcache.clock import Clock


class Backlog:
    """Tokens of requests that wait, and of prefill that plain vLLM is late with.

    A prompt's fresh tokens are those that no pin held for it when it arrived.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting_requests = 0
        # Fresh tokens of all requests so far, and of those that wait no more.
        self._arrived_tokens = 0
        self._passed_tokens = 0
        self._running_tokens = 0  # prompts
        self._late_tokens = 0.0
        self._late_s = 0.0
        self._none_wait_from_s = clock.now_s()

    def on_arrival(self, fresh_tokens: int) -> int:
        """A request waits. Returns the fresh tokens so far, its own included."""
        if not self._waiting_requests:
            self._catch_up()
        self._waiting_requests += 1
        self._arrived_tokens += fresh_tokens
        return self._arrived_tokens

    def on_wait_end(self, fresh_tokens: int) -> None:
        """It was admitted, or it left."""
        self._waiting_requests -= 1
        self._passed_tokens += fresh_tokens
        if not self._waiting_requests:
            self._none_wait_from_s = self._clock.now_s()

    def on_running(self, prompt_tokens: int) -> None:
        """So many tokens more are running; fewer if it is negative."""
        self._running_tokens += prompt_tokens

    def on_saved(self, tokens: int, seconds: float) -> None:
        """A pin spared so much prefill."""
        self._late_tokens += tokens
        self._late_s += max(0.0, seconds)

    def tokens_before(self, arrived_tokens: int, pinned_tokens: int) -> float:
        """Of requests that wait and came earlier, and of what plain vLLM is late with.

        Args:
            arrived_tokens: as `on_arrival` said of a request that was admitted now.
            pinned_tokens: of all pins but the request's own.
        """
        # Those that wait no more took their blocks, or left.
        earlier = max(0, arrived_tokens - self._passed_tokens)
        waiting = self._arrived_tokens - self._passed_tokens
        # The request's own program counts, too: without it tests/bench/test_savings.py
        # finds too little. Programs that ended here may go on in plain vLLM.
        under_way = max(0, pinned_tokens + waiting + self._running_tokens)
        return earlier + min(self._late_tokens, under_way)

    def _catch_up(self) -> None:
        # A clock that is set back has not rested.
        idle_s = max(0.0, self._clock.now_s() - self._none_wait_from_s)
        left = 1.0 - min(1.0, idle_s / self._late_s) if self._late_s else 0.0
        self._late_tokens *= left
        self._late_s *= left
