"""The definition of every number that simulations report.

Pure functions over :class:`TurnRecord`; all times are seconds since the replay's
start unless a name says otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: A returning turn kept its KV when at least this share of the context that its
#: predecessor left was cached. Below 1 because only full blocks can be hit.
KEPT_SHARE = 0.9
#: A session is held (goodput) when nine of ten of its turns begin to answer in time.
HELD_TTFT_S = 30.0


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """What was seen of one turn."""

    program_id: str
    turn: int
    """Index of the turn in its program, from 0."""
    arrival_s: float
    """When the client sent the request."""
    first_token_s: float
    departure_s: float
    """When the last token had arrived."""
    queue_s: float
    """Server side: from joining the waiting queue to first being scheduled."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV the engine found in its cache."""
    output_token_ids: tuple[int, ...]
    first_logprob: float
    """Log-probability of the first output token."""
    tool: str = ""
    gap_s: float = 0.0
    """Length of the gap that follows; 0 after the last turn."""
    server: str = ""
    """Model name in the answer: names the replica where each has its own."""

    @property
    def ttft_s(self) -> float:
        """Time to first token: ``first_token_s - arrival_s``."""
        return self.first_token_s - self.arrival_s

    @property
    def context_tokens(self) -> int:
        """Tokens of the context that this turn leaves: prompt and output."""
        return self.prompt_tokens + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of one arm."""

    num_programs: int
    num_turns: int
    mean_jct_s: float
    p50_jct_s: float
    p90_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    time_to_90pct_s: float
    makespan_s: float
    programs_per_s: float
    turns_per_min: float
    output_tokens_per_s: float
    p99_turn_s: float
    """From a request to its last token."""
    mean_running: float
    prompt_hit: float
    kept_gap_share: float
    mean_wait_s: float
    mean_ttft_s: float
    p95_ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


def summarize(records: Sequence[TurnRecord]) -> Summary:
    """All numbers of one arm.

    Raises:
        ValueError: no records.
    """
    if not records:
        raise ValueError("no turn was completed: nothing to summarize")
    jcts = list(jct_s(records).values())
    ttfts = [record.ttft_s for record in records]
    kept = kept_gaps(records)
    output = sum(len(record.output_token_ids) for record in records)
    return Summary(
        num_programs=len(jcts),
        num_turns=len(records),
        mean_jct_s=_mean(jcts),
        p50_jct_s=percentile(jcts, 50),
        p90_jct_s=percentile(jcts, 90),
        p95_jct_s=percentile(jcts, 95),
        p99_jct_s=percentile(jcts, 99),
        time_to_90pct_s=time_to_share_s(records, 0.9),
        makespan_s=makespan_s(records),
        programs_per_s=len(jcts) / makespan_s(records),
        turns_per_min=60.0 * len(records) / makespan_s(records),
        output_tokens_per_s=output / makespan_s(records),
        p99_turn_s=percentile([r.departure_s - r.arrival_s for r in records], 99),
        mean_running=mean_running(records),
        prompt_hit=prompt_hit(records),
        kept_gap_share=_mean([float(k) for k in kept.values()]) if kept else 0.0,
        mean_wait_s=_mean([record.queue_s for record in records]),
        mean_ttft_s=_mean(ttfts),
        p95_ttft_s=percentile(ttfts, 95),
        prompt_tokens=sum(record.prompt_tokens for record in records),
        cached_tokens=sum(record.cached_tokens for record in records),
        output_tokens=output,
    )


@dataclass(frozen=True, slots=True)
class Steady:
    """Of the counted programs, those between warm-up and drain, by arrival."""

    jct_s: tuple[float, ...]
    held: tuple[bool, ...]
    """The 90th percentile of the program's own TTFTs is within `HELD_TTFT_S`."""
    ttft_s: tuple[float, float, float]
    """50th, 95th and 99th percentile over the turns."""
    worst_turn_s: float
    prompt_hit: float
    programs_per_s: float
    """Completions a second, without the first and last ones of all programs."""


def steady(
    records: Sequence[TurnRecord], program_ids: Sequence[str], warm_up: int, drain: int
) -> Steady:
    """What the programs have that are neither among the first nor the last ones.

    Args:
        program_ids: by arrival.
        warm_up, drain: programs that are not counted at either end.
    """
    last = len(program_ids) - drain
    grouped = by_program(records)
    counted = {name: grouped[name] for name in program_ids[warm_up:last]}
    turns = [record for own in counted.values() for record in own]
    ttfts = [record.ttft_s for record in turns]
    ends = sorted(max(r.departure_s for r in own) for own in grouped.values())
    began_s = ends[warm_up - 1] if warm_up else min(r.arrival_s for r in records)
    return Steady(
        tuple(map(jct_s(turns).__getitem__, counted)),
        tuple(
            percentile([r.ttft_s for r in own], 90) <= HELD_TTFT_S
            for own in counted.values()
        ),
        (percentile(ttfts, 50), percentile(ttfts, 95), percentile(ttfts, 99)),
        max(record.departure_s - record.arrival_s for record in turns),
        prompt_hit(turns),
        len(counted) / (ends[last - 1] - began_s),
    )


def jct_s(records: Sequence[TurnRecord]) -> dict[str, float]:
    """Job completion time a program: last departure - first arrival, gaps included."""
    return {
        program_id: max(r.departure_s for r in own) - min(r.arrival_s for r in own)
        for program_id, own in by_program(records).items()
    }


def makespan_s(records: Sequence[TurnRecord]) -> float:
    """Last departure of all - first arrival of all."""
    return max(r.departure_s for r in records) - min(r.arrival_s for r in records)


def mean_running(records: Sequence[TurnRecord]) -> float:
    """Requests that were past the waiting queue, in the mean over the makespan."""
    busy_s = sum(r.departure_s - r.arrival_s - r.queue_s for r in records)
    return busy_s / makespan_s(records)


def time_to_share_s(records: Sequence[TurnRecord], share: float) -> float:
    """First arrival of all to the moment ``ceil(share * programs)`` have ended."""
    ends = sorted(
        max(r.departure_s for r in own) for own in by_program(records).values()
    )
    rank = max(1, math.ceil(share * len(ends) - 1e-9))
    return ends[rank - 1] - min(r.arrival_s for r in records)


def prompt_hit(records: Sequence[TurnRecord]) -> float:
    """Sum of cached prompt tokens / sum of prompt tokens, first turns included."""
    prompts = sum(record.prompt_tokens for record in records)
    return sum(record.cached_tokens for record in records) / prompts if prompts else 0.0


def kept_gaps(records: Sequence[TurnRecord]) -> dict[tuple[str, int], bool]:
    """Per gap (program, turn before it): did the context's KV survive it?

    True when the next turn's cached tokens are at least ``KEPT_SHARE`` of the
    context that the turn before the gap left.
    """
    kept = {}
    for program_id, own in by_program(records).items():
        for before, after in itertools.pairwise(own):
            enough = KEPT_SHARE * before.context_tokens
            kept[program_id, before.turn] = after.cached_tokens >= enough
    return kept


def by_program(records: Sequence[TurnRecord]) -> dict[str, list[TurnRecord]]:
    """Records grouped by program, in turn order; programs by first arrival."""
    groups: dict[str, list[TurnRecord]] = {}
    for record in sorted(records, key=lambda r: (r.arrival_s, r.turn)):
        groups.setdefault(record.program_id, []).append(record)
    return groups


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile with linear interpolation between order statistics."""
    if not values:
        raise ValueError("percentile of no values")
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100.0
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """How the outputs of two arms on one workload differ."""

    tokens_identical: bool
    """The same turns were completed and every output token is equal."""
    differing_turns: tuple[tuple[str, int], ...]
    """Turns whose tokens differ, or that only one arm completed."""
    first_token_logprob_max_diff: float
    """Largest absolute difference over turns completed in both arms."""


def compare_outputs(
    left: Sequence[TurnRecord], right: Sequence[TurnRecord]
) -> OutputComparison:
    """Compare two arms turn by turn."""
    ours = _by_turn(left)
    theirs = _by_turn(right)
    common = ours.keys() & theirs.keys()
    differing = {
        key
        for key in common
        if ours[key].output_token_ids != theirs[key].output_token_ids
    } | (ours.keys() ^ theirs.keys())
    diffs = [abs(ours[k].first_logprob - theirs[k].first_logprob) for k in common]
    return OutputComparison(
        not differing, tuple(sorted(differing)), max(diffs, default=math.nan)
    )


def _by_turn(
    records: Sequence[TurnRecord],
) -> Mapping[tuple[str, int], TurnRecord]:
    return {(record.program_id, record.turn): record for record in records}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
