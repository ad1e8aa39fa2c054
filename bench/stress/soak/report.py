"""What a soak must have kept to, and how it is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from bench.command import versions
from bench.stress.soak.options import SoakOptions
from bench.stress.soak.requests import Tally
from bench.stress.soak.watch import MAX_NEW_LINES, Watch, growth_mib
from bench.tables import Check, equal, table
from ttlcache_sim.metrics import percentile

#: What a process may grow by after the warm-up, and what ttlcache's own objects in the
#: engine core may hold under load.
MAX_GROWTH_MIB, MAX_OWN_MIB = 32.0, 8.0


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
    overdue_requests: float
    """Requests that reached W and were served first."""
    hints_rejected: float


@dataclass(frozen=True, slots=True)
class SoakResult:
    """Everything that was seen."""

    tally: Tally
    watch: Watch
    ran_s: float
    """Seconds from the first agent to the last answer."""
    ending: Ending
    log_errors: tuple[str, ...] = ()
    own_mib: float = math.nan
    """Of ttlcache's own objects when the agents ended; NaN: not seen."""


def checks(result: SoakResult, options: SoakOptions) -> list[Check]:
    """Every promise of a soak, in the order in which they are told."""
    tally, ending = result.tally, result.ending
    steady = result.watch.after_warm_up()
    lines = sorted({sample.metrics_lines for sample in steady})
    longest_s = max(tally.waits_s, default=math.nan)
    bound_s = options.longest_wait_s(tally.longest_service_s)
    return [
        _none("errors in the server's log", result.log_errors),
        Check(
            "requests answered 200 in full, aborted ones aside",
            tally.failed == 0 and tally.answered > 0,
            f"{tally.answered:,} answered, {tally.failed:,} not"
            + (f", e.g. {tally.reasons[0]}" if tally.reasons else ""),
            "0 not",
        ),
        _none("scrapes of /metrics that failed", result.watch.failures),
        _growth("API server", [sample.api_rss_mib for sample in steady]),
        _growth("engine core", [sample.engine_rss_mib for sample in steady]),
        Check(
            "lines of /metrics after warm-up",
            bool(lines) and lines[-1] - lines[0] <= MAX_NEW_LINES,
            " … ".join(f"{n:,}" for n in dict.fromkeys(lines[:1] + lines[-1:])),
            f"{MAX_NEW_LINES} more",
        ),
        Check(
            "memory of ttlcache's own objects",
            result.own_mib <= MAX_OWN_MIB,
            f"{result.own_mib:.1f} MiB",
            f"{MAX_OWN_MIB:g} MiB",
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
            f"{options.longest_wait_s(0):g} s + {options.agents} x "
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
    low = min((sample.free_blocks for sample in samples), default=math.nan)
    slowest_s = max((sample.scrape_s for sample in samples), default=math.nan)
    rows = (
        ("answered turns", f"{tally.answered:,}"),
        ("turns a second", f"{tally.answered / result.ran_s:.1f}"),
        ("aborted turns", f"{tally.aborted:,}"),
        ("programs ended / abandoned", f"{tally.programs:,} / {tally.left:,}"),
        ("programs by identification", styles),
        (
            "turns with malformed hints / rejections",
            f"{tally.junk_hints:,} / {ending.hints_rejected:,.0f}",
        ),
        ("prompt tokens / from cache", f"{tally.prompt_tokens:,} / {hit:.0%}"),
        (
            "wait p50 / p99",
            f"{percentile(waits, 50):.2f} / {percentile(waits, 99):.2f} s",
        ),
        ("pins", pins),
        ("preemptions", f"{ending.preemptions:,.0f}"),
        ("requests that reached W", f"{ending.overdue_requests:,.0f}"),
        ("free blocks, fewest seen", f"{low:,.0f} of {ending.pool_blocks:,.0f}"),
        ("slowest scrape of /metrics", f"{slowest_s:.2f} s"),
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
        "tally": tally,
        "wait_s": {f"p{p}": percentile(waits, p) for p in (50, 90, 99, 100)},
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


def _growth(name: str, rss_mib: Sequence[float]) -> Check:
    grown = growth_mib(rss_mib)
    last = rss_mib[-1] if rss_mib else math.nan
    return Check(
        f"memory growth of the {name} after warm-up",
        grown <= MAX_GROWTH_MIB,
        f"{grown:+.1f} MiB, to {last:,.0f} MiB",
        f"{MAX_GROWTH_MIB:g} MiB",
    )
