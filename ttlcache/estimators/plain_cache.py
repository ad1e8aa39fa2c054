"""What plain vLLM's prefix cache would still have of a finished turn.

It gives up what was not used for longest. So it has of a turn what fits into the pool
beside the contexts that were used since the turn ended (its stack distance: Mattson et
al. 1970), each counted once, and from its tail on it is gone. Programs count by their
contexts:

- those with a request since then, and those with one under way: plain vLLM serves in
  the order of arrival, so what waits here has begun there, and is no shorter than the
  mean context;
- those that ended here shortly before: plain vLLM, which prefills again what pins
  spared, is late. It catches up while nothing is prefilled here. Only `LATE_SHARE` of
  that counts: all of it would feed on itself where contexts only begin not to fit.

Against a simulated plain vLLM: tests/bench/test_savings.py.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice
from typing import NamedTuple

from ttlcache.estimators.sliding_mean import SlidingMean

#: Contexts remembered: in a pool that holds more of them less is told as saved.
MAX_CONTEXTS = 1_000
LATE_SHARE = 1 / 8
#: Turns over which the mean context is taken.
WINDOW = 100


class _Context(NamedTuple):
    """A program's: when it was last used, and whether the program is over.

    head_tokens: found cached by its first turn, so others have them, too.
    """

    used_s: float
    tokens: int
    head_tokens: int = 0
    has_ended: bool = False

    @property
    def own_tokens(self) -> int:
        return max(0, self.tokens - self.head_tokens)


_UNKNOWN = _Context(-math.inf, 0)


class PlainCache:
    """Contexts in the order of their last use."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[Hashable, _Context] = OrderedDict()
        # Requests under way, by arrival: when, whose, and how long a prompt.
        self._live: OrderedDict[str, tuple[float, Hashable, int]] = OrderedDict()
        self._turn_tokens = SlidingMean(WINDOW)
        self._late_s = 0.0
        self._caught_up_s = -math.inf

    def on_arrival(
        self, request_id: str, program: Hashable, prompt_tokens: int, now_s: float
    ) -> None:
        self._live[request_id] = (now_s, program, prompt_tokens)
        self._use(program, prompt_tokens, now_s)

    def on_program_start(self, program: Hashable, cached_tokens: int) -> None:
        """A program's first turn got its memory, and found so much."""
        context = self._contexts.get(program)
        if context is not None:
            self._contexts[program] = context._replace(head_tokens=cached_tokens)

    def on_leave(self, request_id: str) -> None:
        """The request is over, in whatever way."""
        self._live.pop(request_id, None)

    def on_turn_end(self, program: Hashable, tokens: int, now_s: float) -> None:
        self._turn_tokens.observe(tokens)
        self._use(program, tokens, now_s)

    def on_program_end(self, program: Hashable) -> None:
        context = self._contexts.get(program)
        if context is not None:
            self._contexts[program] = context._replace(has_ended=True)

    def on_saved(self, prefill_s: float) -> None:
        """A pin spared so much, for which plain vLLM is late."""
        self._late_s += prefill_s

    def on_step(self, start_s: float, end_s: float, *, prefills: bool) -> None:
        """A step of the engine is over."""
        self.on_idle_until(start_s if prefills else end_s)
        self._caught_up_s = max(self._caught_up_s, end_s)

    def on_idle_until(self, now_s: float) -> None:
        """Nothing was prefilled since the last such step."""
        if now_s > self._caught_up_s:
            self._late_s = max(0.0, self._late_s - (now_s - self._caught_up_s))
            self._caught_up_s = now_s

    def hit_tokens(
        self, program: Hashable, ended_s: float, pool_tokens: float
    ) -> float:
        """Of the turn of `program` that ended then, from its beginning; maybe more
        than it has.

        Args:
            pool_tokens: that the KV pool holds.
        """
        own = self._contexts.get(program)
        head_tokens = 0 if own is None else own.head_tokens
        left = pool_tokens - head_tokens
        late_s = LATE_SHARE * self._late_s
        for other, context in reversed(self._contexts.items()):
            if left <= 0 or context.used_s <= ended_s - late_s:
                break
            is_newer = context.used_s > ended_s
            if other != program and (is_newer or context.has_ended):
                left -= context.own_tokens
        for arrived_s, other, tokens in islice(self._live.values(), MAX_CONTEXTS):
            if left <= 0 or arrived_s > ended_s:
                break
            known = self._contexts.get(other, _UNKNOWN)
            if other != program and known.used_s <= ended_s:
                mean_tokens = self._turn_tokens.value
                left -= max(0.0, max(tokens, mean_tokens) - known.head_tokens)
        return head_tokens + max(0.0, left)

    def _use(self, program: Hashable, tokens: int, now_s: float) -> None:
        known = self._contexts.pop(program, _UNKNOWN)
        self._contexts[program] = _Context(now_s, tokens, known.head_tokens)
        if len(self._contexts) > MAX_CONTEXTS:
            self._contexts.popitem(last=False)
