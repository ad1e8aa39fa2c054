"""The rule of the authors' published code, not of their paper.

Source: the analysis of vllm-continuum (paper/004 §5.3): a tool whose mean gap is at
most 2.0 s is pinned for 2.0 s, a slower one is not, an unknown one counts as 0 s,
and a turn without a tool call is not pinned. Continuum v1 §4.5 describes the same
rule with two thresholds, which are options here.
"""

from __future__ import annotations

from pydantic import Field

from ttlcache.policies.base import Policy, PolicyOptions, View, remaining
from ttlcache.types import FINAL_TOOL, USER_TOOL, Decision, GapKey, TurnFacts


class ContinuumPublicOptions(PolicyOptions):
    """threshold_s: slowest mean gap that is pinned; ttl_s: for how long."""

    threshold_s: float = Field(default=2.0, ge=0.0)
    ttl_s: float = Field(default=2.0, ge=0.0)


class ContinuumPublic(Policy):
    """A fixed pin for tools that are fast on average.

    The source's name of a tool is the first word of a shell command, hence the
    executable where there is one. Its mean is over all time; ours over the window.
    """

    name = "continuum-public"
    Options = ContinuumPublicOptions
    options: ContinuumPublicOptions

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        if turn.gap_key.tool in (USER_TOOL, FINAL_TOOL):
            return Decision(0.0, "no-tool")
        key = GapKey(turn.gap_key.tool, turn.gap_key.executable)
        gaps_s = view.gaps.durations(key)
        if len(gaps_s) == 0:
            return Decision(remaining(self.options.ttl_s, turn), "unknown-tool")
        mean_s = float(gaps_s.mean())
        inputs = {"mean_s": mean_s, "count": float(len(gaps_s))}
        if mean_s > self.options.threshold_s:
            return Decision(0.0, "slow-tool", inputs)
        return Decision(remaining(self.options.ttl_s, turn), "fast-tool", inputs)
