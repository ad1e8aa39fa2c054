"""What a soak must have kept to, and how it is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from bench.compare.rounds import versions
from bench.sim.metrics import percentile
from bench.stress.soak.requests import Tally
from bench.stress.soak.watch import Watch, growth_mib
from bench.tables import Check, equal, table


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is allowed."""

    agents: int
    max_queue_wait_s: float
    """W of docs/scheduling.md: seconds after which a request is overdue."""
    rss_growth_mib: float
    """Per process, from the end of the warm-up to the end."""
    own_mib: float = 8.0
    """Ttlcache's own objects in the engine core, at any time."""

    def longest_wait_s(self, longest_service_s: float) -> float:
        """Docs/scheduling.md: W + (n + 1) L, where n < agents wait before it."""
        return self.max_queue_wait_s + self.agents * longest_service_s


@dataclass(frozen=True, slots=True)
class Ending:
    """The server after the last agent went home; NaN: it did not answer."""

    pool_blocks: float
    free_after_ttl: float
    """Free blocks once every TTL has passed, nothing reset."""
    free_after_reset: float
    hook_errors: float
    retention_enabled: float
    pins: dict[str, float]
    """Pins by outcome."""
    preemptions: float
    aged_requests: float
    """Requests that reached W and were served first."""
    hints_rejected: float


@dataclass(frozen=True, slots=True)
class SoakResult:
    """Everything that was seen."""

    tally: Tally
    watch: Watch
    ending: Ending
    log_errors: tuple[str, ...]
    ran_s: float
    """Seconds from the first agent to the last answer."""
    own_mib: tuple[float, ...] = ()
    """Looks at ttlcache's own objects."""


def checks(result: SoakResult, bounds: Bounds) -> list[Check]:
    """Every promise of a soak, in the order in which they are told."""
    return [*_of_the_server(result, bounds), *_of_ttlcache(result, bounds)]


def _of_the_server(result: SoakResult, bounds: Bounds) -> list[Check]:
    tally, watch = result.tally, result.watch
    steady = watch.after_warm_up()
    lines = sorted({sample.metrics_lines for sample in steady})
    return [
        _none("errors in the server's log", result.log_errors),
        Check(
            "requests answered 200 in full, aborted ones aside",
            tally.failed == 0 and tally.answered > 0,
            f"{tally.answered:,} answered, {tally.failed:,} not"
            + (f", e.g. {tally.reasons[0]}" if tally.reasons else ""),
            "0 not",
        ),
        _none("scrapes of /metrics that failed", watch.failures),
        *(
            _growth(name, [getattr(sample, key) for sample in steady], bounds)
            for name, key in (
                ("API server", "api_rss_mib"),
                ("engine core", "engine_rss_mib"),
            )
        ),
        Check(
            "lines of /metrics after warm-up",
            len(lines) == 1,
            " … ".join(f"{n:,}" for n in dict.fromkeys(lines[:1] + lines[-1:])),
            "constant",
        ),
    ]


def _of_ttlcache(result: SoakResult, bounds: Bounds) -> list[Check]:
    tally, ending = result.tally, result.ending
    longest_s = max(tally.waits_s, default=math.nan)
    bound_s = bounds.longest_wait_s(tally.longest_service_s)
    own = result.own_mib
    return [
        Check(
            "memory of ttlcache's own objects",
            max(own, default=0.0) <= bounds.own_mib,
            f"{own[0]:.1f} … {own[-1]:.1f} MiB, at most {max(own):.1f}"
            if own
            else "not looked at: too short",
            f"{bounds.own_mib:g} MiB",
        ),
        equal("exceptions in hooks", ending.hook_errors, 0),
        equal("retention still on", ending.retention_enabled, 1),
        equal(
            "blocks free when all TTLs have passed",
            ending.free_after_ttl,
            ending.pool_blocks,
        ),
        equal("blocks free after a reset", ending.free_after_reset, ending.pool_blocks),
        Check(
            "longest wait of a request",
            longest_s <= bound_s,
            f"{longest_s:.1f} s",
            f"{bounds.max_queue_wait_s:g} s + {bounds.agents} x "
            f"{tally.longest_service_s:.1f} s = {bound_s:.0f} s",
        ),
    ]


def load_table(result: SoakResult) -> Table:
    """What the server went through."""
    tally, ending, samples = result.tally, result.ending, result.watch.samples
    hit = tally.cached_tokens / tally.prompt_tokens if tally.prompt_tokens else 0.0
    waits = sorted(tally.waits_s) or [math.nan]
    styles = ", ".join(f"{k} {n:,}" for k, n in sorted(tally.styles.items()))
    pins = ", ".join(f"{k} {n:,.0f}" for k, n in sorted(ending.pins.items()) if n)
    low = min((sample.gauges["free_blocks"] for sample in samples), default=math.nan)
    rows = (
        ("answered turns", f"{tally.answered:,}"),
        ("turns a second", f"{tally.answered / result.ran_s:.1f}"),
        ("aborted turns", f"{tally.aborted:,}"),
        ("programs ended / abandoned", f"{tally.programs:,} / {tally.left:,}"),
        ("programs by identification", styles),
        ("turns with malformed hints / rejections", _pair(tally, ending)),
        ("prompt tokens / from cache", f"{tally.prompt_tokens:,} / {hit:.0%}"),
        (
            "wait p50 / p99",
            f"{percentile(waits, 50):.2f} / {percentile(waits, 99):.2f} s",
        ),
        ("pins", pins),
        ("preemptions", f"{ending.preemptions:,.0f}"),
        ("requests that reached W", f"{ending.aged_requests:,.0f}"),
        ("free blocks, fewest seen", f"{low:,.0f} of {ending.pool_blocks:,.0f}"),
        ("slowest scrape of /metrics", f"{_slowest(result):.2f} s"),
    )
    return table("the load", ("", ""), rows)


def to_json(
    result: SoakResult, found: Sequence[Check], options: dict[str, Any]
) -> dict[str, Any]:
    """Everything as it stands in the result file."""
    tally = asdict(result.tally)
    waits = sorted(tally.pop("waits_s")) or [math.nan]
    return {
        "ok": all(check.ok for check in found),
        "checks": [asdict(check) for check in found],
        "ran_s": result.ran_s,
        "tally": tally
        | {
            "wait_s": {f"p{p}": percentile(waits, p) for p in (50, 90, 99, 100)},
        },
        "ending": asdict(result.ending),
        "log_errors": list(result.log_errors),
        "scrape_failures": list(result.watch.failures),
        "samples": [asdict(sample) for sample in result.watch.samples],
        "options": options,
        "versions": versions(),
    }


def _none(name: str, found: Sequence[str]) -> Check:
    text = f"{len(found)}" + (f", e.g. {found[0]}" if found else "")
    return Check(name, not found, text, "0")


def _growth(name: str, rss_mib: Sequence[float], bounds: Bounds) -> Check:
    grown = growth_mib(rss_mib)
    last = rss_mib[-1] if rss_mib else math.nan
    return Check(
        f"memory growth of the {name} after warm-up",
        grown <= bounds.rss_growth_mib,
        f"{grown:+.1f} MiB, to {last:,.0f} MiB",
        f"{bounds.rss_growth_mib:g} MiB",
    )


def _pair(tally: Tally, ending: Ending) -> str:
    return f"{tally.junk_hints:,} / {ending.hints_rejected:,.0f}"


def _slowest(result: SoakResult) -> float:
    return max((s.scrape_s for s in result.watch.samples), default=math.nan)
