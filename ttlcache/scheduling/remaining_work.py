"""How much work a program has left: learnt from programs that ended.

    work left = E[turns left | turns made] * mean work of a turn

Turns left come from the numbers of turns of ended programs, those under way being
right-censored (Kaplan-Meier): where long programs stay long, a program at turn 30 has
more left than a new one; where all are alike, less. The work of a turn is that of the
program's own turns, drawn towards the mean of all while it has made few.

Work is seconds of engine time without waiting: new prompt tokens by the prefill curve,
and output tokens by the mean seconds of one.

In the queue work left counts as places (`work_delay_places`):

    places = DELAY * trust * places its tenant got in the time that a mean program runs
             * min(work left beyond a new program's / work of a mean one,
                   MAX_EXCESS_PROGRAMS)

Only a program that has more left than a new one is put back: where all are alike the
order is that of arrival, where long ones stay long new ones pass them. By Little's law
the third factor is about how many programs are under way; where no new ones come it
falls to 0, as a request that is put back by places that nobody takes would wait for
ever. `trust` is the slope of the work that came over the work that was expected, of
programs that ended: near 0 where work cannot be foreseen.
"""

from __future__ import annotations

import math
from collections import Counter, deque

import numpy as np

from ttlcache.estimators.sliding_mean import SlidingMean
from ttlcache.estimators.survival import FloatArray
from ttlcache.programs.model import Work

#: Programs whose number of turns is remembered, and turns that are told apart.
WINDOW, MAX_TURNS = 1000, 4096
#: Ended programs below which nothing is known.
MIN_ENDED = 5
#: Turns of an average program that a program's own mean starts with.
PRIOR_TURNS = 2.0
#: Seconds per output token before any was seen: an 8B model on an A100, weights read
#: once from 1.6 TB/s, and a few milliseconds around it.
DEFAULT_DECODE_S = 0.02
#: Places, per place given lately and mean program of work left beyond a new one's.
#: Of 1, 2 and 4 the one with the shortest turns at p99, at the same mean completion
#: time: simulated with measured step times (docs/research/policy-log.md).
DELAY = 4.0
#: Work left beyond a new program's counts as so many mean programs at most.
MAX_EXCESS_PROGRAMS = 2.0
#: A program of which nothing has run yet.
_NEW = Work()
#: Forecasts after which `trust` is half of the slope.
TRUST_PRIOR = 20
#: Turns of all programs over which the work of a turn is averaged.
MEAN_WINDOW = 1000


class RemainingWork:
    """Expected work left of programs. O(1) an event; O(turns) after a program's end."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=WINDOW)
        self._live: Counter[int] = Counter()
        self._prompt_s = SlidingMean(MEAN_WINDOW)
        self._output_s = SlidingMean(MEAN_WINDOW)
        self._token_s = SlidingMean(MEAN_WINDOW)
        self._turns_left: list[float] | None = None
        self._program_s = SlidingMean(WINDOW)
        self.run_s = SlidingMean(WINDOW)  # of ended programs
        self._forecasts = Slope(WINDOW)

    def on_decoded(self, token_s: float) -> None:
        """An output token after the first took so long, in whatever batch it was."""
        if 0.0 < token_s < math.inf:
            self._token_s.observe(token_s)

    def on_turn_finished(self, work: Work, prompt_s: float, outputs: int) -> None:
        """A turn of a live program finished: so long a prompt, so many tokens."""
        token_s = self._token_s.value if self._token_s.count else DEFAULT_DECODE_S
        output_s = max(outputs, 0) * token_s
        if work.turns:
            self._count(work.turns, -1)
            work.prompt_s += prompt_s
            self._prompt_s.observe(prompt_s)
        work.output_s += output_s
        self._output_s.observe(output_s)
        work.turns += 1
        self._count(work.turns, +1)
        if not work.turns & (work.turns - 1):  # a power of two
            left_s = self.left_s(work)
            if left_s is not None:
                work.forecasts += ((work.prompt_s + work.output_s, left_s),)

    def on_program_end(self, work: Work) -> None:
        """The program is over."""
        if not work.turns:
            return
        self._count(work.turns, -1)
        self._ended.append(min(work.turns, MAX_TURNS))
        self._turns_left = None
        total_s = work.prompt_s + work.output_s
        self._program_s.observe(total_s)
        self.run_s.observe(work.last_s - work.first_s)
        for done_s, left_s in work.forecasts:
            if done_s < total_s:  # a turn followed, as where the queue asks
                self._forecasts.observe(left_s, total_s - done_s)

    def work_delay_places(self, work: Work, recent_places: float) -> int:
        """By how many places its work left puts a program back; 0 while unknown.

        recent_places: that its tenant got in the time that a mean program runs.
        """
        left_s, new_s = self.left_s(work), self.left_s(_NEW)
        if left_s is None or new_s is None or left_s <= new_s:
            return 0
        mean_s = self._program_s.value
        if not mean_s > 0.0:
            return 0
        programs = min((left_s - new_s) / mean_s, MAX_EXCESS_PROGRAMS)
        return round(DELAY * self.trust * recent_places * programs)

    @property
    def trust(self) -> float:
        """How far expected work is to be believed, 0 to 1."""
        known = self._forecasts.count / (self._forecasts.count + TRUST_PRIOR)
        return known * min(max(self._forecasts.value, 0.0), 1.0)

    def left_s(self, work: Work) -> float | None:
        """Expected work that the program has left, None while nothing is known."""
        turns = self.turns_left(work.turns)
        if turns is None:
            return None
        prompt_s = (work.prompt_s + PRIOR_TURNS * self._prompt_s.value) / (
            max(work.turns - 1, 0) + PRIOR_TURNS
        )
        output_s = (work.output_s + PRIOR_TURNS * self._output_s.value) / (
            work.turns + PRIOR_TURNS
        )
        return turns * (prompt_s + output_s)

    def turns_left(self, made: int) -> float | None:
        """E[turns still to come | `made` are made], at least 1; None if unknown.

        Where no program made that many: as many again.
        """
        if len(self._ended) < MIN_ENDED:
            return None
        if self._turns_left is None:
            ended = np.bincount(self._ended).astype(np.float64)
            live = np.zeros_like(ended)
            for turns, programs in self._live.items():
                # One that made more than all that ended was at risk all along.
                live[min(turns, len(live) - 1)] += programs
            self._turns_left = mean_residual(ended, live).tolist()
        if made >= len(self._turns_left):
            return float(max(made, 1))
        return max(self._turns_left[made], 1.0)

    def _count(self, turns: int, change: int) -> None:
        turns = min(turns, MAX_TURNS)
        self._live[turns] += change
        if not self._live[turns]:
            del self._live[turns]


class Slope:
    """Of y over x by least squares, of the last so many; 0.0 where x does not vary."""

    def __init__(self, window: int) -> None:
        self._x, self._y = SlidingMean(window), SlidingMean(window)
        self._xx, self._xy = SlidingMean(window), SlidingMean(window)

    def observe(self, x: float, y: float) -> None:
        self._x.observe(x)
        self._y.observe(y)
        self._xx.observe(x * x)
        self._xy.observe(x * y)

    @property
    def count(self) -> int:
        return self._x.count

    @property
    def value(self) -> float:
        mean = self._x.value
        variance = self._xx.value - mean * mean
        if not variance > 1e-9 * self._xx.value:  # rounding
            return 0.0
        return (self._xy.value - mean * self._y.value) / variance


def mean_residual(ended: FloatArray, live: FloatArray) -> FloatArray:
    """E[N - k | N > k] for k = 0 .. longest - 1, by the product-limit estimate.

    Where censored lives leave probability beyond the longest that ended, those last
    as long again.

    Args:
        ended: how many lasted exactly 0, 1, 2, … turns; the last entry is not 0.
        live: how many have made so many and go on; of the same length.
    """
    at_risk = np.cumsum((ended + live)[::-1])[::-1]
    survival = np.cumprod(1.0 - ended / np.maximum(at_risk, 1))  # P(N > k)
    longest = len(ended) - 1
    area = np.cumsum(survival[:longest][::-1])[::-1] + survival[longest] * longest
    left = survival[:longest]
    residual: FloatArray = np.full(longest, float(longest))
    np.divide(area, left, out=residual, where=left > 0.0)
    return residual
