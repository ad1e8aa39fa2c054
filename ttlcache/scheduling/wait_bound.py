"""How long a request waits before it goes first, whatever the order.

An order by program lets a program wait once, and long, instead of at each turn. That
keeps few contexts under way, and pays where a context that leaves GPU memory must be
prefilled again. Above a lower tier that has it then, little is saved, and first turns
are late for nothing. So there W is learnt:

    W = max(LEAST_S, MEAN_WAITS * mean wait of a request)

Whatever the order, about as many requests wait, so by Little's law the mean wait is
about that in order of arrival: a small multiple of it bounds what the order adds.

Where newcomers queue up W is not for them: the order by program starts few contexts at
a time, a bound would start them all, and the tier would not hold them. Where it forgets
some already (`TierKnowledge.keeps`) W is for nobody, as that order keeps their number
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
WINDOW, MIN_REQUESTS = 200, 20
#: More newcomers that wait, over all other requests, than this are a queue of them.
MAX_NEWCOMER_RATIO = 0.5


@dataclass(slots=True)
class WaitBound:
    """W, in seconds.

    fixed_s: what it always is; None: learnt above a tier.
    requests: those between arrival and finish.
    """

    fixed_s: float | None
    tier_knowledge: TierKnowledge
    requests: Sized
    _wait_s: SlidingMean = field(default_factory=lambda: SlidingMean(WINDOW))

    def on_allocated(self, wait_s: float) -> None:
        """A request got its memory after that."""
        self._wait_s.observe(wait_s)

    def seconds(
        self, newcomers: int = 0, may_learn: Callable[[], bool] = lambda: True
    ) -> float:
        """W as it is now.

        Args:
            newcomers: waiting requests of programs that have not started, if this is
                one of them.
            may_learn: asked last; no where some requests are meant to pass others.
        """
        if self.fixed_s is not None:
            return self.fixed_s
        if (
            not self.tier_knowledge.keeps
            or self._wait_s.count < MIN_REQUESTS
            or newcomers > MAX_NEWCOMER_RATIO * (len(self.requests) - newcomers)
            or not may_learn()
        ):
            return LAST_RESORT_S
        return min(max(LEAST_S, MEAN_WAITS * self._wait_s.value), LAST_RESORT_S)
