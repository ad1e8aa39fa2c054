"""How the soak's programs say who they are, and what came back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.serve.replay import Answer
from ttlcache_sim.load.programs import Turn

#: How a program says who it is; "prefix" says nothing.
STYLES = ("hints", "wishes", "continuum", "session", "prefix")
#: Values of `kv_transfer_params.ttlcache` that may cost retention, and nothing else.
JUNK: tuple[object, ...] = (
    {"ttl": -5},
    {"tool_eta_s": "soon"},
    {"program_id": "x" * 10_000},
    {"program_id": {"a": [{"b": []}]}},
    {"program_id": ""},
    {"is_last_step": "maybe"},
    {"tool": [1, 2]},
    {"colour": "blue"},
    {"priority_class": 10**6},
    [1, [2, [3]]],
)
#: Failures kept as text; all are counted.
_MAX_REASONS = 20


@dataclass(slots=True)
class Tally:
    """What the agents saw."""

    answered: int = 0
    aborted: int = 0
    junk_hints: int = 0
    programs: int = 0
    """Programs that ran to their end."""
    left: int = 0
    """Programs abandoned after an abort."""
    styles: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    reasons: list[str] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    """Seconds each answered request waited for its first admission."""
    longest_service_s: float = 0.0
    """Longest time from a request's admission to its last token."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def fail(self, reason: str) -> None:
        """Count a request that should have been answered and was not."""
        self.failed += 1
        if len(self.reasons) < _MAX_REASONS:
            self.reasons.append(reason)

    def answer(self, answer: Answer) -> None:
        """Count one, whose times are seconds since it was asked for."""
        service_s = answer.departure_s - answer.queue_s
        self.answered += 1
        self.waits_s.append(answer.queue_s)
        self.longest_service_s = max(self.longest_service_s, service_s)
        self.prompt_tokens += answer.prompt_tokens
        self.cached_tokens += answer.cached_tokens
        self.output_tokens += len(answer.output_token_ids)


def identify(
    style: str, own_id: str, turn: Turn, last: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """`kv_transfer_params` and headers by which a turn of this style is known."""
    if style == "session":
        return {}, {"X-Session-ID": own_id}
    if style == "prefix":
        return {}, {}
    if style == "continuum":
        flat: dict[str, Any] = {"job_id": own_id, "is_last_step": last}
        return flat | ({"this_func_call": turn.tool} if turn.tool else {}), {}
    hint: dict[str, Any] = {"program_id": own_id, "is_last_step": last}
    if turn.tool:
        hint["tool"] = turn.tool
    if style == "wishes" and not last:
        hint |= {"ttl": "5m", "tool_eta_s": turn.gap_s, "priority_class": 1}
    return {"ttlcache": hint}, {}
