"""Our own traces: JSON lines, each a `RecordedProgram`."""

from __future__ import annotations

from collections.abc import Iterator

from ttlcache_sim.load.traces import Log, Reader, RecordedProgram, TraceError


def _recognises(log: Log) -> bool:
    return isinstance(log.first.get("turns"), list)


def _read(log: Log) -> Iterator[RecordedProgram]:
    seen: set[str] = set()
    for record in log.records:
        program = record.read(RecordedProgram)
        if program.program_id in seen:
            raise TraceError(
                f"{record.where}: program_id {program.program_id!r} occurs twice"
            )
        seen.add(program.program_id)
        yield program


READER = Reader("trace", _recognises, _read)
