"""`python -m bench gaps` on hand-made traces, with costs worked out by hand.

With prefill (0, 0, 2) and T = 1 every loss costs B = 3 seconds, whatever the context.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.cli import app
from bench.gaps.costs import LLAMA_8B_A100, CostSetting
from bench.gaps.replay import Arm, Outcome, replay_gaps
from bench.gaps.report import (
    DEFAULT_ARMS,
    compare,
    parse_arm,
    run_trace,
)
from bench.gaps.scores import best_constant_s, oracle, score
from bench.gaps.traces import GapProgram, GapTurn
from bench.sim.rivals import ablations
from tests.bench.samples import recorded, write_trace
from tests.commands import output_of
from ttlcache import policies
from ttlcache.errors import ConfigError
from ttlcache.policies.adaptive import Adaptive
from ttlcache.types import GapKey

SHARED = Path(__file__).parents[3] / "shared" / "traces"
NAMED = (
    "tb_mini_swe_agent",
    "sweagent_java",
    "weka_claude_code",
    "continuum_fork_swesmith",
    "openhands_example",
)
SETTING = CostSetting(prefill=(0.0, 0.0, 2.0), queueing_delay_s=1.0)


def program(name: str, *gaps_s: float, arrival_s: float = 0.0) -> GapProgram:
    """Turns of one second; after the last gap one more turn that nobody follows."""
    key = GapKey("search")
    turns = [
        GapTurn(key, 100 * (i + 1), 10, 1.0, g)
        for i, g in enumerate((*gaps_s, math.inf))
    ]
    return GapProgram(name, arrival_s, tuple(turns))


def replayed(policy: str, *programs: GapProgram, **options: float) -> list[Outcome]:
    return replay_gaps(list(programs), SETTING, Arm("x", policy, options))


# --- replay ----------------------------------------------------------------


def test_a_constant_holds_pays_and_misses_as_worked_out_by_hand():
    # Gaps 1, 2 and 5 s under a TTL of 2 s: held 1 + 2 + 2, and 2 after the last turn;
    # one miss costs 3. Total 7 + 3 = 10 over 4 turns. A return at 2.0 s is in time.
    own = replayed("fixed", program("a", 1.0, 2.0, 5.0), ttl_s=2.0)
    assert [o.in_time for o in own] == [True, True, False, False]
    assert [o.held_s for o in own] == pytest.approx([1, 2, 2, 2], abs=1e-5)
    result = score(own, price=1.0)
    assert (result.turns, result.returns) == (4, 3)
    assert result.in_time == pytest.approx(2 / 3)
    assert result.pinned_s == pytest.approx(7 / 4, abs=1e-5)
    assert result.cost_s == pytest.approx(10 / 4, abs=1e-5)
    # The price multiplies held seconds only.
    assert score(own, price=0.5).cost_s == pytest.approx((7 / 2 + 3) / 4, abs=1e-5)


def test_nothing_held_is_nothing_won_not_even_a_gap_of_zero():
    own = replayed("none", program("a", 0.0, 1.0))
    assert score(own, price=1.0).cost_s == pytest.approx(2 * 3 / 3)


def test_policies_see_a_gap_when_it_ends_and_not_before():
    # continuum-public pins an unknown tool for 2 s and a known one iff its mean gap
    # is at most 2 s. The first gap ends at 11 s: b decides at 6 s without it (2 s),
    # at 13 s with mean 10 (0 s); a's later turns see (10 + 1) / 2, and so on.
    programs = program("a", 10.0), program("b", 6.0, arrival_s=5.0)
    own = replayed("continuum-public", *programs)
    assert [(o.ttl_s, o.reason) for o in own] == [
        (2.0, "unknown-tool"),
        (2.0, "unknown-tool"),
        (0.0, "slow-tool"),
        (0.0, "slow-tool"),
    ]


def test_ends_are_censored_when_their_program_is_forgotten(monkeypatch):
    # b comes after a was silent for 900 s: adaptive then knows one gap that never
    # ended among two, and nothing else.
    monkeypatch.setattr(Adaptive, "MIN_RECORDS", 1)
    own = replayed("adaptive", program("a", 1.0), program("b", 1.0, arrival_s=2000.0))
    # a: cold, ln (B / price) = ln 3 s, twice. b: a record of 1 s and one of more than
    # 900 s: holding 1 s is worth 3 / 2 - 1 > 0.
    assert [o.ttl_s for o in own][:3] == pytest.approx([math.log(3), math.log(3), 1.0])
    assert own[2].reason == "survival:key"


class Charged(ablations.ChargeWholeTTL, ablations.EndedGapsOnly):
    """A pin costs its TTL, and only gaps that ended count."""

    MIN_RECORDS = 3


def test_a_deadline_asks_again_with_the_time_waited():
    # Gaps of 1 s (x 3) and 4 s are known. At the end of the first second, what is
    # left of a 4 s gap is certain: 3 s more are worth B = 3.5. From its start, 1 s is
    # worth 3 / 4 B - 1 and 4 s are worth B - 4.
    setting = CostSetting(prefill=(0.0, 0.0, 2.5), queueing_delay_s=1.0)
    history = [program(f"h{i}", g) for i, g in enumerate((1.0, 1.0, 1.0, 4.0))]
    late = program("late", 4.0, arrival_s=10.0)
    policies.register("test-charged", f"{__name__}:Charged")
    own = replay_gaps([*history, late], setting, Arm("x", "test-charged"))
    decided = [o for o in own if o.gap_s == 4.0][1]
    assert decided.ttl_s == pytest.approx(1.0)
    assert decided.held_s == pytest.approx(4.0, abs=1e-5)
    assert decided.in_time


def test_an_unknown_gap_is_neither_decided_nor_learnt():
    own = replayed("fixed", program("a", math.nan, 1.0), ttl_s=2.0)
    assert [o.gap_s for o in own] == [1.0, math.inf]


# --- hindsight ----------------------------------------------------------------


def outcomes(*gaps_s: float) -> list[Outcome]:
    return [Outcome(gap_s, 3.0) for gap_s in gaps_s]


def constant_cost_s(own: list[Outcome], price: float, ttl_s: float) -> float:
    """Of the same turns under one TTL for all."""
    held = [
        Outcome(
            o.gap_s,
            o.benefit_s,
            held_s=min(o.gap_s, ttl_s),
            in_time=ttl_s > 0.0 and o.gap_s <= ttl_s,
        )
        for o in own
    ]
    return score(held, price).cost_s


@pytest.mark.parametrize(
    ("price", "max_s", "best_s"),
    [
        # 0: 9. 1: 1 + 3 * 1 + 6 = 10. 2: 1 + 2 + 2 + 2 + 3 = 10. 9: 1 + 2 + 9 + 9 = 21.
        (1.0, 300.0, 0.0),
        # At half the price: 0: 9. 1: 8. 2: 3.5 + 3 = 6.5. 9: 10.5.
        (0.5, 300.0, 2.0),
        # For nothing: 9, unless the cap is lower.
        (0.0, 300.0, 9.0),
        (0.0, 8.0, 2.0),
    ],
)
def test_the_best_constant_by_hand(price, max_s, best_s):
    own = outcomes(1.0, 2.0, 9.0, math.inf)
    assert best_constant_s(own, price, max_s) == best_s


@pytest.mark.parametrize("price", [0.0, 0.3, 1.0, 4.0])
def test_the_best_constant_beats_every_other(price):
    own = outcomes(0.0, 0.5, 0.5, 1.0, 1.7, 4.0, 40.0, 400.0, math.inf, math.inf)
    best_s = best_constant_s(own, price, 300.0)
    best = constant_cost_s(own, price, best_s)
    for ttl_s in (0.0, 1e-6, 0.5, 0.75, 1.0, 1.7, 2.0, 4.0, 40.0, 300.0):
        assert best <= constant_cost_s(own, price, ttl_s) + 1e-12
    assert best_constant_s(outcomes(math.inf), price or 1.0, 300.0) == 0.0


def test_the_oracle_holds_only_what_pays():
    own = outcomes(1.0, 3.0, 3.5, math.inf)
    ideal = oracle(own, 1.0, 300.0)
    assert [o.held_s for o in ideal] == [1.0, 3.0, 0.0, 0.0]
    assert score(ideal, 1.0).cost_s == pytest.approx((1 + 3 + 3) / 4)
    capped = oracle(own, 1.0, 2.0)
    assert [o.in_time for o in capped] == [True, False, False, False]


def test_the_replayed_constant_costs_what_hindsight_says():
    programs = [program("a", 0.2, 7.0, 1.3), program("b", 0.2, 2.9, arrival_s=2.0)]
    result = compare("x", programs, DEFAULT_ARMS, SETTING)
    ttl_s = result.best_constant.ttl_s or 0.0
    own = replayed("fixed", *programs, ttl_s=ttl_s)
    expected_s = constant_cost_s(own, 1.0, ttl_s)
    assert result.best_constant.cost_s == pytest.approx(expected_s, abs=1e-5)
    for each in result.scores.values():
        assert each.cost_s >= result.oracle.cost_s
        assert each.regret_s(result.oracle) >= 0.0


# --- the command ------------------------------------------------------------------


def test_useless_arms_are_named(tmp_path):
    with pytest.raises(ValueError, match="is not JSON"):
        parse_arm("fixed:{")
    with pytest.raises(ValueError, match="must be a JSON object"):
        parse_arm("fixed:3")
    arm = Arm("fixed ttl_s=3", "fixed", {"ttl_s": 3})
    assert parse_arm('fixed:{"ttl_s": 3}') == arm
    assert parse_arm("adaptive:no-history").policy == "adaptive:no-history"
    path = write_trace(tmp_path / "t.gz", recorded({"tool_s": 1.0}, {}))
    with pytest.raises(ConfigError, match="unknown policy"):
        run_trace(path, [Arm("x", "nonsense")], SETTING)


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    path = write_trace(tmp_path / "tiny.jsonl.gz", recorded({"tool_s": 1.0}, {}))
    out = tmp_path / "out" / "gaps.json"
    printed = output_of(app, "gaps", path, "--json", out)
    assert "tiny: 1 programs, 2 turns, 1 returns" in printed
    written = out.read_text()
    arms = json.loads(written)["traces"]["tiny"]["arms"]
    assert {arm.name for arm in DEFAULT_ARMS} < set(arms)
    assert arms["none"]["cost_s"] == pytest.approx(
        (5.0 + 0.01 + 99 * LLAMA_8B_A100[0] + 99**2 * LLAMA_8B_A100[1]) / 2
    )
    assert output_of(app, "gaps", path, "--json", out) == printed
    assert out.read_text() == written


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/traces is absent")
@pytest.mark.parametrize("name", NAMED)
def test_recorded_traces_can_be_replayed(name):
    arms = [Arm("cachettl", "cachettl"), Arm("adaptive", "adaptive")]
    result = run_trace(SHARED / f"{name}.jsonl.gz", arms, CostSetting())
    for own in result.scores.values():
        assert own.turns == result.oracle.turns
        assert own.cost_s >= result.oracle.cost_s
        assert own.in_time > 0.3
    assert result.best_constant.cost_s >= result.oracle.cost_s
    if name == "openhands_example":
        again = run_trace(SHARED / f"{name}.jsonl.gz", arms, CostSetting())
        assert again == result
