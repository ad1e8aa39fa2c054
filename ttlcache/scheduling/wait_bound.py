"""How long a request waits before it goes first, whatever the order.

An order by program lets a program wait once, and long, instead of at each turn. That
keeps few contexts under way, and pays where a context that leaves GPU memory must be
prefilled again. Above a lower tier that has it then, little is saved, and first turns
are late for nothing. So there W is learnt:

    W = max(LEAST_S, MEAN_WAITS * mean wait of a request)

Whatever the order, about as many requests wait, so by Little's law the mean wait is
about that in order of arrival: a small multiple of it bounds what the order adds. That
is for a fixed number of clients, of which each sends its next request when the last one
is answered: their mean completion time is their number over the throughput, in whatever
order. Where clients come by themselves an order by program has fewer of them under way
at a time, and a bound would only turn it around. Which it is the number of requests in
the engine tells: of a fixed number of clients of which most are in it, its variance is
well below its mean (binomial), of others it is the mean (Poisson), or more where they
queue. Where
more contexts are under way than the tier holds it forgets some
(`TierKnowledge.keeps`): then the order by program counts, which keeps their number
down. Measured in docs/research/tiers-measurements.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass, field

from ttlcache.config import LAST_RESORT_S
from ttlcache.estimators.sliding_mean import SlidingMean
from ttlcache.retention.tier_knowledge import TierKnowledge

#: Of 1.5, 2 and 3 the largest that has turns no slower at p99 than 1.2 times those of
#: vLLM above the same tier, where a fixed number of agents shares a server.
MEAN_WAITS = 2.0
#: Below it, W would follow noise, seconds. (2 s made the 99th percentile 1.15 times
#: vLLM's where the mean wait is half a second.)
LEAST_S = 0.1
#: Requests over which the mean is taken, and below which nothing is known.
WINDOW, MIN_REQUESTS = 200, 100
#: And those over which their number is looked at: longer than a queue takes to go.
NUMBERS = 2000
#: Variance over mean of their number below which it is that of fixed clients.
MAX_DISPERSION = 0.5


@dataclass(slots=True)
class WaitBound:
    """W, in seconds.

    fixed_s: what it always is; None: learnt above a tier.
    requests: those between arrival and finish.
    """

    fixed_s: float | None
    tier_knowledge: TierKnowledge
    requests: Sized
    _number: SlidingMean = field(default_factory=lambda: SlidingMean(NUMBERS))
    _square: SlidingMean = field(default_factory=lambda: SlidingMean(NUMBERS))
    _wait_s: SlidingMean = field(default_factory=lambda: SlidingMean(WINDOW))

    def on_allocated(self, wait_s: float) -> None:
        """A request got its memory after that."""
        self._wait_s.observe(wait_s)
        number = len(self.requests)
        self._number.observe(number)
        self._square.observe(number * number)

    def seconds(self, may_learn: Callable[[], bool] = lambda: True) -> float:
        """W as it is now.

        may_learn: asked last; no where some requests are meant to pass others.
        """
        if self.fixed_s is not None:
            return self.fixed_s
        if (
            not self.tier_knowledge.keeps
            or self._wait_s.count < MIN_REQUESTS
            or not self._is_closed
            or not may_learn()
        ):
            return LAST_RESORT_S
        return min(max(LEAST_S, MEAN_WAITS * self._wait_s.value), LAST_RESORT_S)

    @property
    def _is_closed(self) -> bool:
        """Whether a fixed number of clients sends the requests."""
        mean = self._number.value
        return self._square.value - mean * mean < MAX_DISPERSION * mean
