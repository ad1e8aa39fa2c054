"""What losing a pinned context costs, and what holding it costs others.

Every number starts from a stated default and is then fitted to what
the engine really did, because a wrong curve misprices every decision: a prefill
curve used where a reload was possible overstates the benefit many times.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ttlcache.estimators.sliding_mean import SlidingMean
from ttlcache.estimators.step_fit import Step, StepFit
from ttlcache.types import Pressure

#: Seconds per prompt token before anything is known: an 8B model on an A100 at half
#: its bf16 peak (2 * 8e9 flop / 156e12 flop/s). The first real prefills replace it.
DEFAULT_PREFILL = (1e-4, 0.0, 0.0)
#: Most tokens of a step, where that is not known: vLLM's own default for small GPUs.
STEP_TOKENS = 2048
#: With more of the pool free than this, and nobody known to lack blocks, memory is not
#: what the queue waits for.
RESERVE_SHARE = 0.1
#: Reloads of a tier over which their rate is taken.
RELOAD_WINDOW = 32
#: Returns over which their mean wait is taken.
MEAN_WINDOW = 1000
#: Returns after a loss over which a lower tier's share is taken, and below which it is
#: believed to keep everything.
KEPT_WINDOW, MIN_LOST = 100, 5


class MemoryPrice(NamedTuple):
    """Shadow price of memory and weight of lost work, per request that waits.

    A fluid queue. Blocks withheld for a second, a share s of the pool, delay each of
    the w that wait by up to s seconds: w * s. Recovery of a lost context for r seconds
    takes the GPU from all: the r it waits itself, the n that run and the w that wait:
    (w + n + 1) * r. Only the ratio counts, so both are divided by w.

    per_s: s; 0 while nobody waits for memory.
    weight: (w + n + 1) / w; what a second of recovery counts.
    """

    per_s: float
    weight: float


class RebuildCost(NamedTuple):
    """Expected seconds to rebuild a context: those of a prefill, those of a reload."""

    prefill_s: float
    reload_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.reload_s


class ReloadRate:
    """Seconds a token of one lower tier's reloads: the median of the last ones.

    So a stall does not count, and a lasting change soon does.
    """

    def __init__(self, token_s: float) -> None:
        self._latest = deque([token_s], RELOAD_WINDOW)
        self.token_s = token_s

    def observe(self, token_s: float) -> None:
        self._latest.append(token_s)
        self.token_s = statistics.median_low(self._latest)


class CostModel:
    """Prefill and reload seconds, queueing delay, price of memory.

    Args:
        prefill: (a, b, c) to start from: P(n) = a n + b n^2 + c seconds (CacheTTL v4
            §5.2).
        reload: seconds a token of tiers; of others they are learnt.
        step_tokens: most tokens of an engine step.
    """

    def __init__(
        self,
        prefill: Sequence[float] = DEFAULT_PREFILL,
        reload: Mapping[str, float] | None = None,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        self._steps = StepFit(prefill, step_tokens)
        self._reloads = {tier: ReloadRate(s) for tier, s in (reload or {}).items()}
        self._return_waits = SlidingMean(MEAN_WINDOW)
        self._lost_tokens = SlidingMean(KEPT_WINDOW)
        self._kept_tokens = SlidingMean(KEPT_WINDOW)

    def prefill_s(self, context_tokens: float, cached_tokens: float = 0) -> float:
        """P(context) - P(cached), never negative; the constant counts once."""
        if not context_tokens > cached_tokens:
            return 0.0
        n, known = context_tokens, cached_tokens if cached_tokens > 0.0 else 0.0
        a, b, c = self._steps.prefill
        seconds = a * (n - known) + b * (n * n - known * known) + c
        return seconds if seconds > 0.0 else 0.0

    def observe_step(
        self, step: Step, seconds: float, *, is_ahead: bool = False
    ) -> None:
        """See `StepFit.observe`."""
        self._steps.observe(step, seconds, is_ahead=is_ahead)

    def reload_s(self, tier: str, tokens: float) -> float:
        """Seconds to bring `tokens` back from `tier`; inf for a tier never seen."""
        rate = self._reloads.get(tier)
        return math.inf if rate is None else rate.token_s * max(tokens, 0.0)

    def observe_reload(self, tier: str, tokens: int, seconds: float) -> None:
        if not 0.0 < seconds < math.inf or tokens <= 0:
            return
        token_s = seconds / tokens
        self._reloads.setdefault(tier, ReloadRate(token_s)).observe(token_s)

    def recovery_s(self, context_tokens: float, tier: str | None = None) -> float:
        """The cheaper of a prefill and, if `tier` is given, a reload from there."""
        prefill_s = self.prefill_s(context_tokens)
        if tier is None:
            return prefill_s
        return min(prefill_s, self.reload_s(tier, context_tokens))

    def expected_rebuild(self, context_tokens: float, tier: str | None) -> RebuildCost:
        """By a reload where that is cheaper, as often as the tier keeps what it got."""
        prefill_s = self.prefill_s(context_tokens)
        reload_s = math.inf if tier is None else self.reload_s(tier, context_tokens)
        if reload_s >= prefill_s:
            return RebuildCost(prefill_s)
        kept = self.kept_share
        return RebuildCost((1.0 - kept) * prefill_s, kept * reload_s)

    def observe_lost(self, tokens: int, is_found: bool) -> None:
        """A turn came back to a context of which GPU memory lacked `tokens`.

        is_found: whether the lower tier, which was up, had them.
        """
        if tokens > 0:
            self._lost_tokens.observe(float(tokens))
            self._kept_tokens.observe(float(tokens) if is_found else 0.0)

    @property
    def kept_share(self) -> float:
        """Of the tokens that GPU memory had lost, the share that a reload found.

        A tier that is smaller than what is given up forgets it before it is wanted. 1
        while little is known.
        """
        if self._lost_tokens.count < MIN_LOST:
            return 1.0
        return self._kept_tokens.value / self._lost_tokens.value

    def observe_return_wait(self, wait_s: float) -> None:
        """A returning turn whose KV was gone queued for `wait_s` seconds."""
        if wait_s >= 0.0 and math.isfinite(wait_s):
            self._return_waits.observe(wait_s)

    @property
    def queueing_delay_s(self) -> float:
        """T of CacheTTL v4 §4.2: sliding mean of those waits, 0 at the start."""
        return self._return_waits.value

    def memory_price(self, pressure: Pressure, kv_blocks: float) -> MemoryPrice | None:
        """What holding `kv_blocks` costs those who wait, and what losing them costs.

        None for an unknown pool. See `MemoryPrice` for the model.
        """
        pool, waiting = pressure.pool_blocks, pressure.num_waiting
        if pool <= 0:
            return None
        running = max(pressure.num_running, 0)
        if waiting <= 0 or (
            not pressure.memory_is_short and pressure.free_blocks > RESERVE_SHARE * pool
        ):  # those who wait lack a place in the batch, not memory
            return MemoryPrice(0.0, running + 1.0)
        share = min(max(kv_blocks / pool, 0.0), 1.0)
        return MemoryPrice(share, 1.0 + (running + 1.0) / waiting)
