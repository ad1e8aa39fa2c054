"""From a finished turn to a pin: the policy's answer, the caps, the room."""

from __future__ import annotations

import math

import pytest

from ttlcache import policies
from ttlcache.controller import Controller
from ttlcache.estimators.costs import CostModel
from ttlcache.policies.adaptive import Adaptive
from ttlcache.policies.base import Policy
from ttlcache.testing import FakeEngine
from ttlcache.types import Decision, GapKey, PinOutcome


class Scripted(Policy):
    """Answers with whatever the test says."""

    name = "test-scripted"
    answer: object = None

    def decide(self, turn, view):
        answer = self.answer
        if isinstance(answer, dict):  # by the seconds waited
            answer = answer[turn.waited_s]
        if isinstance(answer, Exception):
            raise answer
        return answer


policies.register("test-scripted", f"{__name__}:Scripted")


@pytest.fixture
def scripted(monkeypatch):
    """An engine whose policy gives the answer that the test sets."""
    monkeypatch.setattr(policies, "_load", lambda name: Scripted)

    def with_answer(answer, **config):
        monkeypatch.setattr(Scripted, "answer", answer)
        return FakeEngine({"policy": "test-scripted", **config}, block_tokens=1)

    return with_answer


def make_engine(pool_blocks=20, fraction=1.0, **config):
    return FakeEngine(
        {
            "policy": "fixed",
            "policy_options": {"ttl_s": 60.0},
            "max_pinned_fraction": fraction,
            **config,
        },
        pool_blocks=pool_blocks,
        block_tokens=1,
    )


def ttl_of(engine):
    pins = list(engine.controller.pins)
    return [pin.deadline_s - pin.created_s for pin in pins]


def pinned(engine):
    return {p.program.program_id: p.kv_blocks for p in engine.controller.pins}


def test_the_policy_decides_within_the_cap(scripted):
    engine = scripted(Decision(5.0, "test"), max_ttl_s=60)
    engine.turn("r", [1, 2, 3], program="A")
    assert ttl_of(engine) == [5.0]
    engine = scripted(Decision(math.inf, "test"), max_ttl_s=60)
    engine.turn("r", [1, 2, 3], program="A")
    assert ttl_of(engine) == [60.0]


def test_a_ttl_of_zero_releases_now(scripted):
    engine = scripted(Decision(0.0, "test"))
    engine.turn("r", [1, 2, 3], program="A")
    assert ttl_of(engine) == []
    assert engine.controller.telemetry.metrics.observations["ttl_seconds"] == [0.0]
    assert engine.controller.telemetry.metrics.totals["hook_errors", "policy"] == 0


def test_a_clients_wish_is_heard_within_the_cap(scripted):
    engine = scripted(RuntimeError("not asked"), max_ttl_s=60)
    engine.turn("r1", [1, 2, 3], program="A", ttl=7)
    engine.turn("r2", [4, 5, 6], program="B", ttl="1h")
    engine.turn("r3", [7, 8, 9], program="C", ttl=0)
    assert ttl_of(engine) == [7.0, 60.0]


def test_a_tenant_alone_may_wish_for_the_whole_cap(scripted):
    engine = scripted(Decision(1.0, "test"), max_ttl_s=60)
    for number in range(6):
        engine.turn(f"r{number}", [number] * 8, program=f"P{number}", ttl="1h")
    assert ttl_of(engine) == [60.0] * 6
    assert engine.controller.pins.client_ttl_blocks == 6 * 9


def test_wishes_beyond_the_policy_hold_a_quarter_where_tenants_share(scripted):
    engine = scripted(Decision(1.0, "test"), max_ttl_s=60, max_pinned_fraction=1.0)
    engine.turn("other", [99] * 8, program="other", tenant="two")
    quarter = engine.controller.memory.holder.pressure().pool_blocks / 4
    for number in range(6):
        engine.turn(f"r{number}", [number] * 8, program=f"P{number}", ttl="1h")
    pins = engine.controller.pins
    # One pin may cross the line; those after it get what the policy gives.
    granted = math.ceil(quarter / 9)
    assert ttl_of(engine) == [1.0] + [60.0] * granted + [1.0] * (6 - granted)
    assert pins.client_ttl_blocks == granted * 9
    # A wish within what the policy gives is none.
    engine.turn("short", [50] * 8, program="short", ttl=1)
    assert pins.client_ttl_blocks == granted * 9
    # Where wishes end, others are heard.
    engine.step(61.0)
    assert pins.client_ttl_blocks == 0
    engine.turn("late", [51] * 8, program="late", ttl="1h")
    assert ttl_of(engine) == [60.0]


def test_who_comes_back_to_a_pool_full_of_wishes_gets_room(scripted):
    engine = scripted(Decision(1.0, "test"), max_ttl_s=600, max_pinned_fraction=1.0)
    pins = engine.controller.pins
    for number in range(5):
        engine.turn(f"r{number}", [number] * 8, program=f"P{number}", ttl="1h")
    assert pins.client_ttl_blocks == 5 * 9
    quarter = engine.controller.memory.holder.pressure().pool_blocks / 4
    # Within the second that the policy gives, too, nobody loses anything.
    engine.turn("early", [98] * 8, program="early", tenant="two", last=True)
    assert pins.client_ttl_blocks == 5 * 9
    engine.step(2.0)
    engine.turn("other", [99] * 8, program="other", tenant="two", last=True)
    assert quarter <= pins.client_ttl_blocks < quarter + 9
    # Between its programs that tenant is not forgotten.
    for number in range(10, 14):
        engine.turn(f"r{number}", [number] * 8, program=f"P{number}", ttl="1h")
    assert pins.client_ttl_blocks < quarter + 9


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("broken"),
        None,
        "5 seconds",
        Decision(math.nan, "test"),
        Decision(-1.0, "test"),
        Decision(-math.inf, "test"),
        Decision(None, "test"),
        *(
            Decision(5.0, "test", **{field: number})
            for field in ("policy_ttl_s", "stall_wait_s", "min_keep_share")
            for number in (math.nan, -1.0, None)
        ),
    ],
)
def test_a_broken_policy_costs_the_pin_and_is_counted(scripted, answer):
    engine = scripted(answer)
    engine.turn("r", [1, 2, 3], program="A")
    assert ttl_of(engine) == []
    assert engine.controller.telemetry.metrics.totals["hook_errors", "policy"] == 1
    engine.check()


# --- at the deadline the policy is asked once more ------------------------------


def after(seconds):
    return Decision(seconds, "test")


def expired(engine):
    return engine.controller.telemetry.metrics.totals["pins", PinOutcome.EXPIRED]


def test_a_pin_is_prolonged_for_as_long_as_the_policy_says(scripted):
    # Scenario: 4 s at first; then, with 4 s waited, 3 s more; then no more.
    engine = scripted({0.0: after(4.0), 4.0: after(3.0), 7.0: after(0.0)})
    engine.turn("r", [1, 2, 3], program="A")
    engine.step(seconds=4.0)
    assert ttl_of(engine) == [7.0]
    engine.step(seconds=2.9)
    assert expired(engine) == 0
    engine.step(seconds=0.1)
    assert expired(engine) == 1
    assert engine.controller.telemetry.metrics.observations["pinned_seconds"] == [7.0]
    # What was asked again is not counted again.
    assert engine.controller.telemetry.metrics.observations["ttl_seconds"] == [4.0]
    engine.check()


def test_a_late_step_tells_how_long_the_gap_has_really_lasted(scripted):
    engine = scripted({0.0: after(4.0), 6.5: after(2.0)})
    engine.turn("r", [1, 2, 3], program="A")
    engine.step(seconds=6.5)
    assert ttl_of(engine) == [8.5]


def test_all_in_all_no_pin_outlives_max_ttl(scripted):
    engine = scripted({0.0: after(4.0), 4.0: after(math.inf)}, max_ttl_s=10.0)
    engine.turn("r", [1, 2, 3], program="A")
    engine.step(seconds=4.0)
    assert ttl_of(engine) == [10.0]
    engine = scripted(after(4.0), max_ttl_s=10.0)
    engine.turn("r", [1, 2, 3], program="A")
    for ttl_s in (8.0, 10.0):
        engine.step(seconds=4.0)
        assert ttl_of(engine) == [ttl_s]
    engine.step(seconds=2.0)
    assert expired(engine) == 1


@pytest.mark.parametrize(
    ("answer", "faults"),
    [
        (after(0.04), 0),  # not worth asking for
        (RuntimeError("broken"), 1),
        (after(math.nan), 1),
        (after(-1.0), 1),
        (None, 1),
    ],
)
def test_a_bad_answer_at_the_deadline_lets_the_pin_go(scripted, answer, faults):
    engine = scripted({0.0: after(4.0), 4.0: answer})
    engine.turn("r", [1, 2, 3], program="A")
    engine.step(seconds=4.0)
    assert expired(engine) == 1
    assert engine.controller.telemetry.metrics.totals["hook_errors", "policy"] == faults
    engine.check()


def test_a_clients_own_ttl_is_final(scripted):
    engine = scripted({0.0: after(2.0)})  # asked at the end of the turn only
    engine.turn("r", [1, 2, 3], program="A", ttl=7)
    (pin,) = engine.controller.pins
    assert pin.policy_deadline_s == pin.created_s + 2.0
    engine.step(seconds=7.0)
    assert expired(engine) == 1
    assert engine.controller.telemetry.metrics.totals["hook_errors", "policy"] == 0


def test_a_held_pin_is_not_asked_about_until_it_is_let_go(scripted):
    engine = scripted({0.0: after(4.0), 9.0: after(2.0)})
    context = engine.turn("r1", [1, 2, 3], program="A")
    engine.arrive("r2", context, program="A")
    engine.step(seconds=9.0)
    engine.abort("r2")
    engine.step()
    assert ttl_of(engine) == [11.0]


def priced_engine(**config):
    """A second of prefill for each token."""
    engine = make_engine(**config)
    engine.controller = Controller(
        engine.controller.config,
        engine.clock,
        engine.holder,
        block_tokens=1,
        costs=CostModel({"prefill": [1.0, 0, 0]}),
    )
    return engine


@pytest.mark.parametrize(
    "policy",
    ["fixed", "ski-rental", "cachettl"],
)
def test_rules_that_plan_from_the_start_stand_by_their_plan(policy):
    engine = priced_engine(policy=policy, policy_options={})
    engine.turn("r", [1, 2, 3], program="A")
    (ttl_s,) = ttl_of(engine)
    engine.step(seconds=ttl_s)
    assert expired(engine) == 1


class FlatPrice(Adaptive):
    """A held second costs a second."""

    def _memory_price(self, turn, view):
        return None


policies.register("test-flat-price", f"{__name__}:FlatPrice")


def test_an_estimate_overrun_falls_back_on_the_history():
    # Scenario: the client announced 2 s, and 3 s are held for it; the tool's gaps
    # are 10 s. The context costs 12 s, so the remaining 7 s are worth waiting.
    engine = priced_engine(policy="test-flat-price", policy_options={})
    for _ in range(60):
        engine.controller.gaps.observe(GapKey("slow"), 10.0)
    engine.turn("r", range(11), program="A", tool="slow", tool_eta_s=2)
    assert ttl_of(engine) == [3.0]
    engine.step(seconds=3.0)
    assert ttl_of(engine) == [10.0]
    engine.step(seconds=7.0)
    assert expired(engine) == 1


def test_the_cap_limits_what_is_pinned():
    engine = make_engine(pool_blocks=20, fraction=0.25)
    engine.turn("a", [*range(100, 108)], [1], program="A")
    assert pinned(engine) == {"A": 5}
    pin = next(iter(engine.controller.pins))
    assert pin.kv_tokens == 5
    engine.turn("b", [*range(200, 208)], [1], program="B")
    assert pinned(engine) == {"A": 5}  # B is younger: no room
    engine.check()


def test_younger_programs_make_room_for_older_ones():
    engine = make_engine(pool_blocks=20, fraction=0.5)
    engine.arrive("a", [*range(100, 106)], program="A")
    for number, label in enumerate("BCD"):
        engine.turn(
            label, [*range(200 + 10 * number, 203 + 10 * number)], program=label
        )
    assert pinned(engine) == {"B": 4, "C": 4, "D": 2}
    assert engine.admit("a")
    engine.finish("a")
    assert pinned(engine) == {"A": 5, "B": 4, "C": 1}
    assert engine.controller.telemetry.metrics.totals["pins", PinOutcome.VICTIM] == 1
    engine.check()


def test_held_pins_make_no_room():
    engine = make_engine(pool_blocks=20, fraction=0.25)
    engine.arrive("a", [*range(100, 106)], program="A")
    context = engine.turn("b", [*range(200, 205)], [1], program="B")
    engine.arrive("b2", context, program="B")
    assert engine.admit("a")
    engine.finish("a")
    assert pinned(engine) == {"B": 5}
    engine.check()


def test_blocks_that_a_pin_holds_already_cost_nothing_of_the_cap():
    engine = make_engine(pool_blocks=20, fraction=0.25)
    context = engine.turn("a", [*range(100, 105)], [1], program="A")
    engine.turn("b", [*context, 2], [3], program="B")
    assert pinned(engine) == {"A": 5, "B": 5}
    assert engine.holder.pressure().pinned_blocks == 5
    engine.check()


def test_room_made_by_blocks_of_its_own_is_no_room():
    # Scenario, with room for 5 pinned blocks:
    #   1. B's pin holds 4 blocks that A's turn has, too, and one of its own.
    #   2. A's 9 blocks are 5 more than that: B gives all of its pin.
    #   3. The 4 shared blocks are A's alone now and count anew: A pins 5 in all.
    engine = make_engine(pool_blocks=20, fraction=0.25)
    engine.arrive("a", [*range(100, 110)], program="A")
    assert engine.admit("a")
    engine.turn("b", [100, 101, 102, 103, 200], [1], program="B")
    assert pinned(engine) == {"B": 5}
    engine.finish("a")
    assert pinned(engine) == {"A": 5}
    assert engine.holder.pressure().pinned_blocks == 5
    engine.check()


def test_younger_pins_give_only_what_the_cap_lacks():
    # As above, but A has only 2 blocks that B's pin does not hold.
    engine = make_engine(pool_blocks=20, fraction=0.25)
    engine.arrive("a", [*range(100, 106)], program="A")
    assert engine.admit("a")
    engine.turn("b", [100, 101, 102, 200, 201], [1], program="B")
    engine.finish("a")
    assert pinned(engine) == {"A": 5, "B": 3}
    assert engine.holder.pressure().pinned_blocks == 5
    engine.check()


@pytest.mark.parametrize("none", [{"max_ttl_s": 0}, {"fraction": 0.0}])
def test_a_cap_of_zero_pins_nothing(none):
    engine = make_engine(**none)
    engine.turn("a", [*range(100, 105)], program="A", ttl=5)
    assert pinned(engine) == {}
    assert engine.controller.telemetry.metrics.totals["pins_started", ""] == 0


def test_a_program_that_rewrites_its_history_is_pinned_as_far_as_it_reuses():
    # Scenario: an agent keeps 4 of 10 blocks at every turn and rewrites the rest.
    engine = make_engine(pool_blocks=64)
    for number in range(8):
        rewritten = range(100 * number, 100 * number + 5)
        engine.turn(f"r{number}", [1, 2, 3, 4, *rewritten], [7, 8], program="A")
        engine.check()
    pin = next(iter(engine.controller.pins))
    # The learnt share is a little above 4 of 10, the pin a whole block.
    assert pin.kv_blocks == 5
