"""Readers of what people have recorded, one file a format. Adding one: `READERS`.

A format is recognised from the content of a file. What a log does not hold is guessed,
and marked in `RecordedTurn.estimated`; an unknown tool time is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ttlcache_sim.load.readers import (
    atif,
    claude_code,
    codex,
    kv_cache_tester,
    mini_swe_agent,
    openhands,
    recording,
    request_log,
    swe_agent,
    trace,
    vllm_log,
)
from ttlcache_sim.load.readers.files import logs_in, read_log
from ttlcache_sim.load.traces import Log, Reader, RecordedProgram, TraceError

READERS: tuple[Reader, ...] = (
    trace.READER,
    recording.READER,
    claude_code.READER,
    codex.READER,
    atif.READER,
    mini_swe_agent.READER,
    swe_agent.READER,
    openhands.READER,
    kv_cache_tester.READER,
    request_log.READER,
    vllm_log.READER,
)

_Logs = Iterable[list[Path]]


@dataclass(slots=True)
class Reading:
    """What was read. formats: logs by format. unknown: files in no known format.

    broken: why other files of a folder are left out.
    """

    programs: list[RecordedProgram] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    unknown: list[Path] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def read_programs(path: Path) -> Iterator[RecordedProgram]:
    """The programs of a file or folder, each with an id of its own.

    Raises:
        TraceError: unreadable file, no known format, or a field that is not as it
            should be.
    """
    return iter(read_paths([path]).programs)


def read_paths(
    paths: Sequence[Path], track: Callable[[list[list[Path]]], _Logs] = iter
) -> Reading:
    """The same of several paths; files in a folder may be anything.

    Args:
        track: called with the logs, goes through them; for a progress bar.

    Raises:
        TraceError: as above.
    """
    reading, ids = Reading(), Counter[str]()
    for files in track([files for path in paths for files in logs_in(path)]):
        try:
            log, reader, programs = _read(files)
        except TraceError as error:
            if files[0] in paths:
                raise
            reading.broken.append(str(error))
            continue
        if reader is None:
            if log.path in paths:
                raise _unknown(log)
            reading.unknown.append(log.path)
            continue
        reading.formats[reader.name] += 1
        for program in programs:
            ids[program.program_id] += 1
            if (number := ids[program.program_id]) > 1:
                name = f"{program.program_id} ({number})"
                program = program.model_copy(update={"program_id": name})
            reading.programs.append(program)
    if not reading.programs:
        none = f"{', '.join(map(str, paths))}: no program in it"
        raise TraceError("; ".join([none, *reading.broken[:1]]))
    return reading


def _read(files: list[Path]) -> tuple[Log, Reader | None, list[RecordedProgram]]:
    try:
        log = read_log(files)
        reader = next((each for each in READERS if each.recognises(log)), None)
        return log, reader, [] if reader is None else list(reader.read(log))
    except TraceError:
        raise
    except Exception as error:  # any JSON may lie in a folder: {"type": ["object"]}
        kind = type(error).__name__
        raise TraceError(f"{files[0]}: cannot be read: {kind}: {error}") from error


def _unknown(log: Log) -> TraceError:
    known = ", ".join(reader.name for reader in READERS)
    return TraceError(log.problem or f"{log.path}: in no known format ({known})")
