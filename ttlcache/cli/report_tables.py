"""The tables of `ttlcache report`: of a recording, or of a server's metrics.

The last two cells of a row say from how many samples its numbers are, and whether they
are measured, or estimated by a model of ours.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ttlcache.analysis.recording import Recording, TurnLog
from ttlcache.analysis.summary import Spread, Summary
from ttlcache.cli.common import seconds
from ttlcache.programs.divergence import REMEDIES, Cause

MEASURED, ESTIMATED = "measured", "estimated"
#: Programs, and tools, that a table names.
MOST_ROWS = 12
_SPREAD = ("mean", "p50", "p95", "max")
_EARLY = [cause for cause in Cause if cause.is_early]

Row = tuple[str, ...]


class Table(NamedTuple):
    """columns: of numbers, between the name and the two cells behind them."""

    title: str
    columns: tuple[str, ...]
    rows: list[Row]
    notes: tuple[str, ...] = ()


def of_recording(recording: Recording, summary: Summary) -> list[Table]:
    """Some may have no row."""
    s = summary
    times = {
        "job completion": s.jct,
        "wait of a turn that started": s.wait,
        "life of a pin": s.pin,
    }
    sums = {
        "prompt tokens": s.prompt_tokens,
        "of those, found in GPU memory": s.cached_tokens,
        "block-seconds of pins, held in vain": round(s.wasted_block_s),
        "block-seconds of pins, memory idle": round(s.idle_block_s),
        "preemptions": s.preemptions,
    }
    savings = _savings(
        s.claims,
        (s.claimed_tokens, s.saved_tokens, s.savable_tokens),
        (s.saved_s, s.savable_s),
    )
    runs = f", {len(recording.runs)} runs" if len(recording.runs) > 1 else ""
    if recording.observed_runs:
        note = "policy observe: pins below are would-be ones"
        savings = savings._replace(notes=(*savings.notes, note))
    return [
        savings,
        Table(
            f"{s.programs:,} programs ({s.under_way:,} without an end) in "
            f"{seconds(s.makespan_s)}{runs}",
            _SPREAD,
            [_spread(name, spread) for name, spread in times.items()],
        ),
        _who_waited(recording),
        _slow_tools(recording, s),
        _broken_prefixes(recording),
        _counts("how pins ended", s.outcomes),
        _counts("how turns' programs were found", s.rules),
        Table("in all", ("",), [_row(n, s.turns, f"{v:,}") for n, v in sums.items()]),
    ]


def of_metrics(text: str) -> list[Table]:
    """The same, as far as Prometheus's `text` of a server has it."""
    pins = _values(text, "pins_total", "outcome")
    causes = _values(text, "turns_diverged_total", "cause")
    early = {str(cause): causes[cause] for cause in _EARLY if causes[cause]}
    tokens = ("claimed_tokens", "prefill_tokens_saved", "prefill_tokens_savable")
    spans = ("prefill_seconds_saved", "prefill_seconds_savable")
    return [
        _savings(
            pins["claimed"],
            [_total(text, name) for name in tokens],
            [_total(text, name) for name in spans],
        ),
        _means(text, "who waited: mean by kind of turn", "wait_seconds", "turn"),
        _means(text, "slow tools: mean by class", "tool_gap_seconds", "tool_class"),
        _counts("broken prefixes", early, _remedies(early)),
        _counts("how pins ended", pins),
    ]


# --- tables of both ----------------------------------------------------------


def _savings(claims: float, tokens: Sequence[float], spans: Sequence[float]) -> Table:
    """tokens: claimed, saved, savable. spans: seconds saved, savable."""
    claimed, saved, savable = tokens
    found = (
        ("prompt tokens served from pins", f"{claimed:,.0f}", MEASURED),
        ("saved: plain vLLM would have evicted", f"{saved:,.0f}", ESTIMATED),
        ("prefill saved", seconds(spans[0]), ESTIMATED),
        ("tokens that pins would have saved, at most", f"{savable:,.0f}", ESTIMATED),
        ("prefill that pins would have saved, at most", seconds(spans[1]), ESTIMATED),
    )
    would_be = found[3:] if savable else ()
    shown = (*(found[:3] if claimed or not would_be else ()), *would_be)
    rows = [_row(name, claims, value, how=how) for name, value, how in shown]
    return Table("what pins saved", ("",), rows)


def _counts(title: str, counts: Mapping[str, float], notes: Row = ()) -> Table:
    whole = sum(counts.values())
    rows = [_row(name, whole, f"{n:,.0f}") for name, n in sorted(counts.items()) if n]
    return Table(title, ("",), rows, notes)


def _row(name: str, samples: float, *cells: str, how: str = MEASURED) -> Row:
    return (name, *cells, f"{samples:,.0f}", how)


def _remedies(causes: Iterable[str]) -> Row:
    return tuple(f"{cause}: {REMEDIES[Cause(cause)]}" for cause in causes)


# --- of a recording ----------------------------------------------------------


def _spread(name: str, spread: Spread, *more: str) -> Row:
    spans = (spread.mean, spread.p50, spread.p95, spread.max)
    return _row(name, spread.count, *map(seconds, spans), *more)


def _who_waited(recording: Recording) -> Table:
    turns: dict[str, list[TurnLog]] = defaultdict(list)
    for log, turn in recording.turns():
        if turn.wait_s:
            turns[log.program].append(turn)
    found = [_wait_row(name, own) for name, own in turns.items()]
    found.sort(key=lambda row: -row[0])
    everyone = _wait_row("all", [turn for own in turns.values() for turn in own])
    rows = [row for _, row in [everyone, *found[:MOST_ROWS]]] if found else []
    notes: tuple[str, ...] = (
        "memory: pins and running requests held it; growth: admission left it to "
        "programs under way; batch: no place in the batch, or behind others.",
    )
    if len(found) > MOST_ROWS:
        notes = (f"{MOST_ROWS} of {len(found)} programs are shown.", *notes)
    columns = ("waited", "memory", "growth", "batch", "longest")
    return Table("who waited, and for what", columns, rows, notes)


def _wait_row(name: str, turns: Sequence[TurnLog]) -> tuple[float, Row]:
    """Seconds waited, and the row."""
    waits_s = [turn.wait_s or 0.0 for turn in turns]
    growth_s = sum(turn.memory_wait_s for turn in turns if turn.refused_for_growth)
    memory_s = sum(turn.memory_wait_s for turn in turns) - growth_s
    waited_s = sum(waits_s)
    batch_s = max(0.0, waited_s - memory_s - growth_s)
    spans = (waited_s, memory_s, growth_s, batch_s, max(waits_s, default=0.0))
    return waited_s, _row(name, len(turns), *map(seconds, spans))


def _slow_tools(recording: Recording, summary: Summary) -> Table:
    """The tools that took most seconds in all."""
    kept: Counter[str] = Counter()
    for _, turn in recording.turns():
        if turn.decided is not None:
            kept[turn.decided.tool] += turn.next_claimed
    slowest = sorted(summary.gaps.items(), key=lambda kv: -kv[1].mean * kv[1].count)
    rows = [
        _spread(tool, gaps, f"{kept[tool] / gaps.count:.0%}")
        for tool, gaps in slowest[:MOST_ROWS]
    ]
    return Table("slow tools: time between turns", (*_SPREAD, "pinned"), rows)


def _broken_prefixes(recording: Recording) -> Table:
    """Programs of which a prompt left the last context early."""
    lost: dict[tuple[str, Cause], list[int]] = defaultdict(list)
    for log, turn in recording.turns():
        found = turn.divergence
        if found is not None and found.is_sure and found.cause.is_early:
            tokens = found.context_tokens - found.at_tokens
            lost[log.program, found.cause].append(tokens)
    worst = sorted(lost.items(), key=lambda kv: -sum(kv[1]))[:MOST_ROWS]
    rows = [
        _row(program, len(tokens), cause, f"{sum(tokens):,}", how=ESTIMATED)
        for (program, cause), tokens in worst
    ]
    causes = [cause for cause in _EARLY if any(cause is c for _, c in lost)]
    columns = ("where", "computed again")
    return Table("programs that broke their prefix", columns, rows, _remedies(causes))


# --- of metrics ----------------------------------------------------------------


def _means(text: str, title: str, name: str, label: str) -> Table:
    sums_s, counts = (_values(text, f"{name}_{end}", label) for end in ("sum", "count"))
    rows = [
        _row(of, counts[of], seconds(sum_s / counts[of]))
        for of, sum_s in sorted(sums_s.items(), key=lambda kv: -kv[1])
        if counts[of]
    ]
    return Table(title, ("mean",), rows)


def _total(text: str, name: str) -> float:
    return sum(_values(text, f"{name}_total").values())


def _values(text: str, name: str, label: str = "") -> dict[str, float]:
    """Values of a metric of ours by one of its labels, all engines together."""
    found: dict[str, float] = defaultdict(float)
    for labels, value in re.findall(
        rf"^ttlcache_{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE
    ):
        named = re.search(rf'\b{label}="([^"]*)"', labels) if label else None
        found[named[1] if named else ""] += float(value)
    return found
