"""The contract of a retention policy.

A policy answers one question: for how many seconds is this finished turn's KV
worth its memory? It is pure: no clock, no randomness, no side effect, and it
neither knows nor touches pins. `ttlcache.testing.policy_contract` checks the
contract for any implementation, ours or yours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.types import Decision, Pressure, TurnFacts


class PolicyOptions(BaseModel):
    """Base of every policy's options: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class View(NamedTuple):
    """Everything outside the turn that a decision may depend on. Read-only.

    gaps: durations seen so far, per gap key and global.
    costs: seconds to rebuild a context, queueing delay T, price of memory.
    memoryfulness: eta of the workload, in [-1, 1] (paper §4.1).
    avg_turns: mean number of turns of finished programs, 0 while none finished.
    now_s: the time by the clock of `gaps`; None leaves still-open gaps out.
    tier: under which name `costs` knows the reloads of the lower tier, which gets what
        GPU memory gives up; None while there is none.
    tier_has_copy: the tier, where there is one, is written through: it has this turn
        already, and evicting it costs no copy.
    tier_keeps: lately the tier had what was evicted and wanted again.
    """

    gaps: GapHistory
    costs: CostModel
    memoryfulness: float = 1.0
    avg_turns: float = 0.0
    pressure: Pressure = Pressure()
    now_s: float | None = None
    tier: str | None = None
    tier_has_copy: bool = True
    tier_keeps: bool = False

    def recovery_s(self, turn: TurnFacts) -> float:
        """PrefillReload(r): seconds to rebuild the turn's context if it is lost."""
        return self.costs.recovery_s(turn.context_tokens, self.tier)


class Policy(ABC):
    """One retention rule."""

    name: ClassVar[str]
    #: Whether `decide` makes use of `turn.tool_eta_s`.
    reads_eta: ClassVar[bool] = False
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self.options = options if options is not None else self.Options()

    @abstractmethod
    def decide(self, turn: TurnFacts, view: View) -> Decision:
        """Seconds to keep `turn`'s KV blocks.

        Must return a finite or infinite `ttl_s >= 0`, never NaN, whatever the
        history holds; at most 100 µs at 10,000 recorded gaps. The seconds count
        from now: rules that plan a gap from its start subtract `turn.waited_s`
        (`remaining`). A negative wait, from a clock that went back, counts as 0.
        """


def remaining(ttl_s: float, turn: TurnFacts) -> float:
    """What is left of a TTL that was planned from the start of the gap."""
    left_s = ttl_s - max(turn.waited_s, 0.0)
    return left_s if left_s > 0.0 else 0.0  # inf - inf is NaN, and NaN > 0 is false
