"""Conversations from single requests: one goes on from that whose prompt it extends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.sim.load.readers import base
from bench.sim.load.traces import RecordedProgram
from ttlcache.types import GapKey

#: Of an answer that is not in the log: the mean of our workloads.
_OUTPUT_TOKENS = 250


@dataclass(frozen=True, slots=True)
class Request:
    """prompt: its text. answer: anything with its text, None where it is not logged.

    session: an id that the client sent, "" for none. Others: as in `base.Call`.
    """

    prompt: str
    usage: base.Usage = field(default_factory=base.Usage)
    answer: Any = None
    tools: Sequence[GapKey] | None = None
    start_s: float | None = None
    end_s: float | None = None
    session: str = ""

    @property
    def call(self) -> base.Call:
        usage = self.usage
        output = usage.output_tokens
        if output is None and self.answer:
            output = base.num_tokens(base.num_chars(self.answer))
        return base.Call(
            usage.whole_prompt or base.num_tokens(len(self.prompt)),
            _OUTPUT_TOKENS if output is None else output,
            self.start_s,
            self.end_s,
            self.tools,
            is_counted=usage.is_whole,
        )


@dataclass(slots=True)
class _Conversation:
    name: str
    prompt: str = ""
    calls: list[base.Call] = field(default_factory=list)


def conversations(requests: Sequence[Request], name: str) -> Iterator[RecordedProgram]:
    """Programs of requests, sorted by time where all have one.

    A prefix cache sees the same: what does not extend an earlier prompt is new.
    """
    if all(request.start_s is not None for request in requests):
        requests = sorted(requests, key=lambda request: request.start_s or 0.0)
    found: list[_Conversation] = []
    by_session: dict[str, list[_Conversation]] = {}
    for request in requests:
        own = by_session.setdefault(request.session, [])
        known = [each for each in own if request.prompt.startswith(each.prompt)]
        longest = max(known, key=lambda each: len(each.prompt), default=None)
        if longest is None:
            longest = _Conversation(request.session or f"{name}-{len(found)}")
            found.append(longest)
            own.append(longest)
        longest.prompt = request.prompt
        longest.calls.append(request.call)
    for each in found:
        yield from base.programs_of(each.name, each.calls)
