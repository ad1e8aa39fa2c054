"""Sessions of logs, made fit for a replay, and what had to be guessed for that."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from ttlcache.toolcalls.classes import tool_class
from ttlcache.types import GapKey
from ttlcache_sim.load.readers import Reading, read_paths
from ttlcache_sim.load.readers.model_calls import num_tokens
from ttlcache_sim.load.traces import RecordedProgram, RecordedTurn

#: Where a log has no times: seconds by class of tool, others `_OTHER_TOOL_S`.
TOOL_S = {
    "shell-look": 0.1,
    "shell-run": 10.0,
    "read": 0.1,
    "edit": 0.2,
    "run": 10.0,
    "fetch": 2.0,
    "subagent": 60.0,
    "user": 60.0,
    "approval": 60.0,
}
_OTHER_TOOL_S = 1.0
#: A person who comes back later than this says nothing about a cache.
MAX_GAP_S = 600.0
_SHOWN_FILES = 3


@dataclass(frozen=True, slots=True)
class Sessions:
    """programs: every gap is known. notes: what was guessed, left out or cut."""

    programs: tuple[RecordedProgram, ...]
    notes: tuple[str, ...]

    @property
    def mean_turns(self) -> float:
        return statistics.fmean(len(program.turns) for program in self.programs)

    def mean_context_tokens(self, most: int) -> float:
        """Of the final contexts, each counted as `most` at most."""
        return statistics.fmean(min(most, _final_tokens(p)) for p in self.programs)

    @property
    def shortest_context_tokens(self) -> int:
        """Of the final contexts."""
        return min(map(_final_tokens, self.programs))

    @property
    def median_gap_s(self) -> float:
        """Between two turns; 0 where every program has one."""
        gaps = [turn.tool_s or 0.0 for _, turn in _gaps(self.programs)]
        return statistics.median(gaps or [0.0])

    @property
    def best_hit(self) -> float:
        """Share of the prompt tokens that an endless prefix cache hits."""
        hit = prompts = 0
        for number, program in enumerate(self.programs):
            first = program.turns[0]
            hit += min(first.shared_tokens, first.new_prompt_tokens) if number else 0
            context = 0
            for turn in program.turns:
                hit += context
                prompts += context + turn.new_prompt_tokens
                context += turn.new_prompt_tokens + turn.output_tokens
        return hit / prompts


def _final_tokens(program: RecordedProgram) -> int:
    return sum(turn.new_prompt_tokens + turn.output_tokens for turn in program.turns)


def read_sessions(paths: Sequence[Path], console: Console) -> Sessions:
    """
    Raises:
        ttlcache_sim.load.traces.TraceError: a file that cannot be read, or no program.
    """

    def tracked(logs: list[list[Path]]) -> Iterable[list[Path]]:
        return track(logs, "reading", console=console, transient=True)

    reading = read_paths(paths, tracked)
    headed, notes = with_shared_heads(reading.programs)
    filled = [
        program.model_copy(update={"turns": list(map(_filled, program.turns))})
        for program in headed
    ]
    return Sessions(tuple(filled), (*_notes(reading), *notes))


def with_shared_heads(
    programs: Sequence[RecordedProgram],
) -> tuple[list[RecordedProgram], list[str]]:
    """Programs with the tokens that their first prompts share, and how it is known.

    A trace may say it itself. Else what a server's cache had of them, where the log
    says so and it was not cold: the median. Else the larger one of two: the characters
    that each shares with the one most like it, and, where texts lack system prompt and
    tools, the least that a counted prompt has beyond its text.
    """
    first = [each for each in programs if each.part == 1]
    cached = [n for each in first if (n := each.cached_tokens) is not None]
    by_cache = round(statistics.median(cached or [0]))
    openings = sorted(each.opening for each in first if each.opening)
    next_to = [_alike(*pair) for pair in itertools.pairwise(openings)]
    alike = map(max, [0, *next_to], [*next_to, 0]) if next_to else [0]
    by_text = num_tokens(statistics.median(alike))
    unlogged = [n for each in first if (n := each.unlogged_tokens) is not None]
    lacking = min(unlogged) if len(unlogged) > 1 else 0

    def head(program: RecordedProgram) -> int:
        if program.turns[0].shared_tokens:
            return program.turns[0].shared_tokens
        if program.cached_tokens is not None and by_cache:
            return by_cache
        known = program.unlogged_tokens is not None
        return max(by_text if program.opening else 0, lacking if known else 0)

    tokens_of = [head(each) for each in programs]
    nothing = "nothing that the log tells (system prompt, tools): in favour of ttlcache"
    notes = [
        f"{count} of {len(programs)} first prompts share "
        + (f"their first {tokens:,} tokens" if tokens else nothing)
        for tokens, count in Counter(tokens_of).most_common(_SHOWN_FILES)
    ]
    return list(map(_with_head, programs, tokens_of)), notes


def _with_head(program: RecordedProgram, tokens: int) -> RecordedProgram:
    first, *rest = program.turns
    first = first.model_copy(update={"shared_tokens": tokens})
    return program.model_copy(update={"turns": [first, *rest]})


def _alike(one: str, other: str) -> int:
    """Characters with which both begin."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def save_trace(programs: Iterable[RecordedProgram], folder: Path) -> Path:
    """A trace file of them."""
    lines = [program.model_dump_json(exclude_none=True) + "\n" for program in programs]
    path = folder / "sessions.jsonl"
    path.write_text("".join(lines))
    return path


def _filled(turn: RecordedTurn) -> RecordedTurn:
    gap_s = _default_s(turn) if turn.tool_s is None else turn.tool_s
    return turn.model_copy(update={"tool_s": min(gap_s, MAX_GAP_S)})


def _default_s(turn: RecordedTurn) -> float:
    """Of parallel calls the slowest one's."""
    keys = [GapKey(name, turn.exe or "") for name in (turn.tool or "").split("+")]
    return max(TOOL_S.get(tool_class(key), _OTHER_TOOL_S) for key in keys)


def _gaps(
    programs: Iterable[RecordedProgram],
) -> Iterable[tuple[RecordedProgram, RecordedTurn]]:
    return ((program, turn) for program in programs for turn in program.turns[:-1])


def _notes(reading: Reading) -> Iterable[str]:
    found = ", ".join(f"{count} of {name}" for name, count in reading.formats.items())
    yield f"{len(reading.programs)} programs in logs: {found}"
    if reading.unknown:
        names = ", ".join(str(path) for path in reading.unknown[:_SHOWN_FILES])
        more = ", …" if len(reading.unknown) > _SHOWN_FILES else ""
        count = len(reading.unknown)
        yield f"{count} files in no known format are left out: {names}{more}"
    if reading.broken:
        count, why = len(reading.broken), reading.broken[0]
        yield f"{count} files are left out, the first: {why}"
    turns = [turn for program in reading.programs for turn in program.turns]
    gaps = [turn for _, turn in _gaps(reading.programs)]
    uncounted = sum("tokens" in turn.estimated for turn in turns)
    if uncounted:
        yield f"tokens of {uncounted} of {len(turns)} turns: characters / 4"
    unknown = sum(turn.tool_s is None for turn in gaps)
    if unknown:
        typical_s = statistics.median(_default_s(t) for t in gaps if t.tool_s is None)
        yield (
            f"tool times of {unknown} of {len(gaps)} gaps: a default for each class, "
            f"{typical_s:.3g} s in the median"
        )
    guessed = sum("tool_s" in turn.estimated for turn in gaps)
    if guessed:
        yield f"tool times of {guessed} of {len(gaps)} gaps: less 20 ms a token decoded"
    shrunk = sum("context" in turn.estimated for turn in turns)
    if shrunk:
        yield (
            f"{shrunk} of {len(turns)} prompts are shorter than the context before "
            "them and count as cached: in favour of ttlcache"
        )
    long = sum((turn.tool_s or 0.0) > MAX_GAP_S for turn in gaps)
    if long:
        yield f"{long} of {len(gaps)} gaps are cut to {MAX_GAP_S:.0f} s"
