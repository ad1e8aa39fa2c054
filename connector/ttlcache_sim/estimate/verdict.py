"""From runs to what a person wants to know: does it pay, from which load, when not."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ttlcache_sim.bootstrap import (
    BLOCK_PROGRAMS,
    MIN_BLOCKS,
    Interval,
    paired_bootstrap,
)
from ttlcache_sim.estimate.plan import ARMS, SEEDS
from ttlcache_sim.estimate.sessions import Sessions
from ttlcache_sim.metrics import HELD_TTFT_S
from ttlcache_sim.settings import CellResult

#: A job completion time that is less than this much shorter is the same.
_WORTH = 0.05
#: So near to the best hit rate there is nothing to gain.
_NEAR = 0.02


@dataclass(frozen=True, slots=True)
class Outcome:
    """One arm at one load; times in seconds, hit and held as shares.

    held: programs nine of ten of whose turns begin to answer within `HELD_TTFT_S`.
    """

    mean_jct_s: float
    p95_ttft_s: float
    hit: float
    held: float


@dataclass(frozen=True, slots=True)
class Load:
    """rate: programs a second. ratio: job completion time with over without."""

    rate: float
    without: Outcome
    with_ttlcache: Outcome
    ratio: Interval

    @property
    def pays(self) -> bool:
        return self.ratio.high < 1.0 and self.ratio.ratio <= 1.0 - _WORTH


def loads_of(rates: Sequence[float], results: Sequence[CellResult]) -> list[Load]:
    """results: as `Plan.cells` orders the cells."""
    steady = iter([result.steady for result in results])
    loads = []
    for rate in rates:
        base, ours = ([next(steady) for _ in SEEDS] for _ in ARMS)
        ours_s, base_s = ([run["jct_s"] for run in runs] for runs in (ours, base))
        ratio = paired_bootstrap(ours_s, base_s, block_programs(len(base_s[0])))
        loads.append(Load(rate, _outcome(base), _outcome(ours), ratio))
    return loads


def block_programs(counted: int) -> int:
    """So many consecutive programs that there are enough blocks of them."""
    return max(1, min(BLOCK_PROGRAMS, counted * len(SEEDS) // MIN_BLOCKS))


def _outcome(runs: Sequence[dict[str, Any]]) -> Outcome:
    return Outcome(
        statistics.fmean(chain(*(run["jct_s"] for run in runs))),
        statistics.fmean(run["ttft_s"][1] for run in runs),
        statistics.fmean(run["prompt_hit"] for run in runs),
        statistics.fmean(chain(*(run["held"] for run in runs))),
    )


def verdict(
    loads: Sequence[Load], sessions: Sessions, limits: Sequence[float]
) -> list[str]:
    """From which load it pays, and when it does not: a sentence each.

    limits: programs a second that vLLM alone and ttlcache complete. Beyond that
        the queue grows for as long as the load lasts: no percentage says what it saves.
    """
    by_rate = sorted(loads, key=lambda load: load.rate)
    paying = [load for load in by_rate if load.pays]
    if not paying:
        return [f"It pays at none of these loads: {_why_not(loads[-1], sessions)}."]
    first, others = paying[0], [load for load in by_rate if not load.pays]
    on = "on" if all(load.rate < first.rate for load in others) else "on, not always"
    told = f"It pays from {first.rate:.3g} programs/s {on}: {_gain(first, limits)}."
    if not others:
        return [told, f"Less than {first.rate:.3g} programs/s was not simulated."]
    why = _why_not(others[-1], sessions)
    return [told, f"It does not pay at {others[-1].rate:.3g} programs/s: {why}."]


def _gain(load: Load, limits: Sequence[float]) -> str:
    vllm, ours = limits
    gain = f"{1.0 - load.ratio.ratio:.0%} less time a job"
    if load.rate > vllm:
        gain = f"vLLM alone does not keep up, it completes {vllm:.3g}/s"
        gain += f", ttlcache {ours:.3g}/s"
    before_s, after_s = load.without.p95_ttft_s, load.with_ttlcache.p95_ttft_s
    if after_s > (1.0 + _WORTH) * before_s:
        gain += f"; but p95 TTFT is {after_s:.3g} s for {before_s:.3g} s"
    return gain


def _why_not(load: Load, sessions: Sessions) -> str:
    best, hit = sessions.best_hit, load.without.hit
    if hit >= best - _NEAR:
        return (
            "the pool holds all contexts, vLLM alone hits "
            f"{hit:.0%} of the prompt tokens and no cache more than {best:.0%}"
        )
    if load.ratio.low > 1.0 and load.ratio.ratio >= 1.0 + _WORTH:
        return f"a job takes {load.ratio.ratio - 1.0:.0%} longer"
    if load.ratio.ratio > 1.0 - _WORTH:
        ours, gap_s = load.with_ttlcache.hit, sessions.median_gap_s
        return (
            f"a job takes {max(0.0, 1.0 - load.ratio.ratio):.0%} less time, "
            f"vLLM alone hits {hit:.0%} of the prompt tokens, ttlcache {ours:.0%}, "
            f"tools take {gap_s:.3g} s in the median"
        )
    return "the difference may be chance; more sessions would tell"


def rows(loads: Sequence[Load]) -> list[list[str]]:
    """For a table, two a load; columns: `COLUMNS`."""
    found = []
    for load in loads:
        low, high = load.ratio.low, load.ratio.high
        ratio = f"{load.ratio.ratio:.2f} ({low:.2f}-{high:.2f})"
        for name, outcome, told in (
            ("vLLM", load.without, ""),
            ("ttlcache", load.with_ttlcache, ratio),
        ):
            found.append(
                [
                    f"{load.rate:.3g}" if not told else "",
                    name,
                    f"{outcome.mean_jct_s:.1f}",
                    told,
                    f"{outcome.p95_ttft_s:.2f}",
                    f"{outcome.hit:.0%}",
                    f"{outcome.held:.0%}",
                ]
            )
    return found


COLUMNS = (
    *("per s", "", "job s", "ratio (95 %)", "p95 TTFT s", "hit"),
    f"TTFT ≤ {HELD_TTFT_S:.0f} s",
)
