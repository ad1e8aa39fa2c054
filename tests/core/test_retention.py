"""From a finished turn to a pin: the policy's answer, the caps, the room."""

from __future__ import annotations

import math

import pytest

from tests.core.stories import make_engine, token_engine, with_prefill_cost
from ttlcache import policies
from ttlcache.policies.base import Policy
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
        return make_engine(policy="test-scripted", block_tokens=1, **config)

    return with_answer


def after(seconds):
    return Decision(seconds, "test")


def ttl_of(engine):
    return [pin.deadline_s - pin.created_s for pin in engine.pins()]


def expired(engine):
    return engine.outcomes()[PinOutcome.EXPIRED]


def faults(engine):
    return engine.total("hook_errors", "policy")


@pytest.mark.parametrize(
    ("told_s", "ttl_s"), [(5.0, [5.0]), (math.inf, [60.0]), (0.0, [])]
)
def test_the_policy_decides_within_the_cap(scripted, told_s, ttl_s):
    engine = scripted(after(told_s), max_ttl_s=60)
    engine.turn("r", [1, 2, 3], program="A")
    assert ttl_of(engine) == ttl_s
    assert engine.observed("ttl_seconds") == [min(told_s, 60.0)]
    assert faults(engine) == 0


def test_a_clients_wish_is_heard_within_the_cap(scripted):
    engine = scripted(RuntimeError("not asked"), max_ttl_s=60)
    engine.turn("r1", [1, 2, 3], program="A", ttl=7)
    engine.turn("r2", [4, 5, 6], program="B", ttl="1h")
    engine.turn("r3", [7, 8, 9], program="C", ttl=0)
    assert ttl_of(engine) == [7.0, 60.0]


# --- clients that wish for more than the policy gives ---------------------------


def wish(engine, *numbers, ttl="1h"):
    """Programs of nine blocks each."""
    for number in numbers:
        engine.turn(f"r{number}", [number] * 8, program=f"P{number}", ttl=ttl)


def come_back(engine, label):
    """A program of another tenant makes its only turn."""
    engine.turn(label, [99] * 8, program=label, tenant="two", is_last_step=True)


def client_ttl_blocks(engine):
    return engine.controller.pins.client_ttl_blocks


def test_a_tenant_alone_may_wish_for_the_whole_cap(scripted):
    engine = scripted(after(1.0), max_ttl_s=60)
    wish(engine, *range(6))
    assert ttl_of(engine) == [60.0] * 6
    assert client_ttl_blocks(engine) == 6 * 9


def test_wishes_beyond_the_policy_hold_a_quarter_where_tenants_share(scripted):
    engine = scripted(after(1.0), max_ttl_s=60, max_pinned_fraction=1.0)
    engine.turn("other", [99] * 8, program="other", tenant="two")
    wish(engine, *range(6))
    # One pin may cross the line; those after it get what the policy gives.
    granted = math.ceil(engine.holder.pool_blocks / 4 / 9)
    assert ttl_of(engine) == [1.0] + [60.0] * granted + [1.0] * (6 - granted)
    assert client_ttl_blocks(engine) == granted * 9
    # A wish within what the policy gives is none.
    wish(engine, 50, ttl=1)
    assert client_ttl_blocks(engine) == granted * 9
    # Where wishes end, others are heard.
    engine.step(61.0)
    assert client_ttl_blocks(engine) == 0
    wish(engine, 51)
    assert ttl_of(engine) == [60.0]


def test_who_comes_back_to_a_pool_full_of_wishes_gets_room(scripted):
    engine = scripted(after(1.0), max_ttl_s=600, max_pinned_fraction=1.0)
    wish(engine, *range(5))
    assert client_ttl_blocks(engine) == 5 * 9
    quarter = engine.holder.pool_blocks / 4
    # Within the second that the policy gives, too, nobody loses anything.
    come_back(engine, "early")
    assert client_ttl_blocks(engine) == 5 * 9
    engine.step(2.0)
    come_back(engine, "other")
    assert quarter <= client_ttl_blocks(engine) < quarter + 9
    # Between its programs that tenant is not forgotten.
    wish(engine, *range(10, 14))
    assert client_ttl_blocks(engine) < quarter + 9


# --- at the deadline the policy is asked once more ------------------------------


BROKEN = [
    RuntimeError("broken"),
    None,
    "5 seconds",
    *(after(seconds) for seconds in (math.nan, -1.0, -math.inf, None)),
    *(
        after(5.0)._replace(**{field: number})
        for field in ("policy_ttl_s", "stall_wait_s", "min_keep_share")
        for number in (math.nan, -1.0, None)
    ),
]


@pytest.mark.parametrize("answer", BROKEN)
def test_a_broken_policy_costs_the_pin_and_is_counted(scripted, answer):
    engine = scripted(answer)
    engine.turn("r", [1, 2, 3], program="A")
    assert ttl_of(engine) == []
    assert faults(engine) == 1
    # And at the deadline.
    engine = scripted({0.0: after(4.0), 4.0: answer})
    engine.turn("r", [1, 2, 3], program="A")
    engine.step(seconds=4.0)
    assert expired(engine) == 1
    assert faults(engine) == 1


@pytest.mark.parametrize(
    ("answer", "steps"),
    [
        # 4 s at first; then, with 4 s waited, 3 s more; then too little to ask.
        (
            {0.0: after(4.0), 4.0: after(3.0), 7.0: after(0.04)},
            [(4.0, 7.0), (2.9, 7.0), (0.1, None)],
        ),
        # A late step tells how long the gap has really lasted.
        ({0.0: after(4.0), 6.5: after(2.0)}, [(6.5, 8.5)]),
        # All in all no pin outlives max_ttl_s.
        ({0.0: after(4.0), 4.0: after(math.inf)}, [(4.0, 10.0)]),
        (after(4.0), [(4.0, 8.0), (4.0, 10.0), (2.0, None)]),
    ],
)
def test_a_pin_is_prolonged_for_as_long_as_the_policy_says(scripted, answer, steps):
    engine = scripted(answer, max_ttl_s=10.0)
    engine.turn("r", [1, 2, 3], program="A")
    for seconds, ttl_s in steps:
        engine.step(seconds)
        assert ttl_of(engine) == ([] if ttl_s is None else [ttl_s])
    if steps[-1][1] is None:
        assert expired(engine) == 1
        assert engine.observed("pinned_seconds") == [engine.clock.now_s()]
    # What was asked again is not counted again.
    assert engine.observed("ttl_seconds") == [4.0]
    assert faults(engine) == 0


def test_a_clients_own_ttl_is_final(scripted):
    engine = scripted({0.0: after(2.0)})  # asked at the end of the turn only
    engine.turn("r", [1, 2, 3], program="A", ttl=7)
    (pin,) = engine.pins()
    assert pin.policy_deadline_s == pin.created_s + 2.0
    engine.step(seconds=7.0)
    assert expired(engine) == 1
    assert faults(engine) == 0


def test_a_held_pin_is_not_asked_about_until_it_is_let_go(scripted):
    engine = scripted({0.0: after(4.0), 9.0: after(2.0)})
    context = engine.turn("r1", [1, 2, 3], program="A")
    engine.arrive("r2", context, program="A")
    engine.step(seconds=9.0)
    engine.abort("r2")
    engine.step()
    assert ttl_of(engine) == [11.0]


@pytest.mark.parametrize("policy", ["fixed", "ski-rental", "cachettl"])
def test_rules_that_plan_from_the_start_stand_by_their_plan(policy):
    engine = with_prefill_cost(token_engine(policy=policy))
    engine.turn("r", [1, 2, 3], program="A")
    (ttl_s,) = ttl_of(engine)
    engine.step(seconds=ttl_s)
    assert expired(engine) == 1


policies.register("test-flat-price", "bench.sim.rivals.ablations:FlatPrice")


def test_an_estimate_overrun_falls_back_on_the_history():
    # Scenario: the client announced 2 s, and 3 s are held for it; the tool's gaps
    # are 10 s. The context costs 12 s, so the remaining 7 s are worth waiting.
    engine = with_prefill_cost(token_engine(policy="test-flat-price"))
    for _ in range(60):
        engine.controller.gaps.observe(GapKey("slow"), 10.0)
    engine.turn("r", range(11), program="A", tool="slow", tool_eta_s=2)
    assert ttl_of(engine) == [3.0]
    engine.step(seconds=3.0)
    assert ttl_of(engine) == [10.0]
    engine.step(seconds=7.0)
    assert expired(engine) == 1


# --- the cap: a quarter of 20 blocks ---------------------------------------------


@pytest.fixture
def engine():
    return token_engine(pool_blocks=20, max_pinned_fraction=0.25)


def test_the_cap_limits_what_is_pinned(engine):
    engine.turn("a", [*range(100, 108)], [1], program="A")
    assert engine.pinned() == {"A": 5}
    assert engine.pins()[0].kv_tokens == 5
    engine.turn("b", [*range(200, 208)], [1], program="B")
    assert engine.pinned() == {"A": 5}  # B is younger: no room


def test_younger_programs_make_room_for_older_ones():
    engine = token_engine(pool_blocks=20, max_pinned_fraction=0.5)
    engine.arrive("a", [*range(100, 106)], program="A")
    for number, label in enumerate("BCD"):
        first = 200 + 10 * number
        engine.turn(label, [*range(first, first + 3)], program=label)
    assert engine.pinned() == {"B": 4, "C": 4, "D": 2}
    assert engine.admit("a")
    engine.finish("a")
    assert engine.pinned() == {"A": 5, "B": 4, "C": 1}
    assert engine.total("pins", PinOutcome.VICTIM) == 1


def test_held_pins_make_no_room(engine):
    engine.arrive("a", [*range(100, 106)], program="A")
    context = engine.turn("b", [*range(200, 205)], [1], program="B")
    engine.arrive("b2", context, program="B")
    assert engine.admit("a")
    engine.finish("a")
    assert engine.pinned() == {"B": 5}


def test_blocks_that_a_pin_holds_already_cost_nothing_of_the_cap(engine):
    context = engine.turn("a", [*range(100, 105)], [1], program="A")
    engine.turn("b", [*context, 2], [3], program="B")
    assert engine.pinned() == {"A": 5, "B": 5}
    assert engine.holder.pressure().pinned_blocks == 5


@pytest.mark.parametrize(
    ("a_tokens", "b_prompt", "b_before", "b_after"),
    [
        # B's pin holds 4 blocks that A's turn has, too, and one of its own. A's 9
        # blocks are 5 more than that: B gives all of its pin. The 4 shared blocks are
        # A's alone now and count anew: A pins 5 in all.
        (10, [100, 101, 102, 103, 200], 5, 0),
        # A has only 2 blocks that B's pin does not hold: B gives what the cap lacks.
        (6, [100, 101, 102, 200, 201], 5, 3),
    ],
)
def test_room_made_by_blocks_of_its_own_is_no_room(
    engine, a_tokens, b_prompt, b_before, b_after
):
    engine.arrive("a", [*range(100, 100 + a_tokens)], program="A")
    assert engine.admit("a")
    engine.turn("b", b_prompt, [1], program="B")
    assert engine.pinned() == {"B": b_before}
    engine.finish("a")
    assert engine.pinned() == {"A": 5} | ({"B": b_after} if b_after else {})
    assert engine.holder.pressure().pinned_blocks == 5


@pytest.mark.parametrize("none", [{"max_ttl_s": 0}, {"max_pinned_fraction": 0.0}])
def test_a_cap_of_zero_pins_nothing(none):
    engine = token_engine(**none)
    engine.turn("a", [*range(100, 105)], program="A", ttl=5)
    assert engine.pinned() == {}
    assert engine.total("pins_started") == 0


def test_a_program_that_rewrites_its_history_is_pinned_as_far_as_it_reuses():
    # Scenario: an agent keeps 4 of 10 blocks at every turn and rewrites the rest.
    engine = token_engine(pool_blocks=64)
    for number in range(8):
        rewritten = range(100 * number, 100 * number + 5)
        engine.turn(f"r{number}", [1, 2, 3, 4, *rewritten], [7, 8], program="A")
    # The learnt share is a little above 4 of 10, the pin a whole block.
    assert engine.pinned() == {"A": 5}
