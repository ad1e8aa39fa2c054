"""The public contract suite on every registered policy, and on wrong ones.

Whatever was seen and whatever is asked, 0 <= TTL <= cap.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core import test_policies_adaptive  # noqa: F401 - registers its own
from tests.fake_engine import FakeEngine
from ttlcache import policies
from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.policies.base import Policy, View
from ttlcache.testing.policy_contract import PolicyContract
from ttlcache.types import FINAL_GAP, USER_GAP, Decision, GapKey, Pressure, TurnFacts

VARIANTS = {
    **{name: (name, {}) for name in policies.SHIPPED},
    "fixed-forever": ("fixed", {"ttl_s": math.inf}),
    "cachettl-k0": ("cachettl", {"k": 0}),
    "adaptive-eager": ("test-adaptive-eager", {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
class TestEveryPolicy(PolicyContract):
    @pytest.fixture(autouse=True)
    def _choose(self, variant):
        self.variant = variant

    def make_policy(self):
        return policies.create(*VARIANTS[self.variant])


class Wrong(Policy):
    name = "wrong"

    def __init__(self, *answers):
        super().__init__()
        self._answers = answers
        self._calls = 0

    def decide(self, turn, view):
        self._calls += 1
        return self._answers[self._calls % len(self._answers)]


@pytest.mark.parametrize(
    ("answers", "test"),
    [
        ([Decision(math.nan, "nan")], "test_empty_history"),
        ([Decision(-1.0, "negative")], "test_empty_history"),
        ([Decision(1.0, "")], "test_empty_history"),
        ([Decision(1.0, "odd inputs", {"text": "x"})], "test_empty_history"),
        (
            [Decision(float(i), "counts") for i in range(7)],
            "test_same_inputs_give_the_same_answer",
        ),
    ],
)
def test_the_suite_catches_wrong_and_impure_answers(answers, test):
    class Suite(PolicyContract):
        def make_policy(self):
            return Wrong(*answers)

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()


# --- bounds ---------------------------------------------------------------------

KEYS = (GapKey("bash", "git"), GapKey("search"), USER_GAP, FINAL_GAP)
SECONDS = st.one_of(
    st.sampled_from([0.0, 1e-300, 1e-9, 1.0, 1e9, 1e300]),
    st.floats(0.0, 1e4, allow_nan=False),
)
#: (key, seconds, whether the next turn came)
RECORDS = st.lists(st.tuples(st.sampled_from(KEYS), SECONDS, st.booleans()))
PRESSURES = st.builds(Pressure, *[st.integers(-2, 10_000)] * 6)
COEFFICIENTS = st.floats(1e-12, 1e6)


@st.composite
def views(draw):
    history = GapHistory()
    for key, gap_s, came in draw(RECORDS):
        history.observe(key, gap_s, completed=came)
    for number, since_s in enumerate(draw(st.lists(SECONDS, max_size=5))):
        history.start(number, KEYS[number % len(KEYS)], since_s)
    profile = {"prefill": [draw(COEFFICIENTS) for _ in range(3)]}
    if draw(st.booleans()):
        profile["reload"] = {"cpu": draw(COEFFICIENTS)}
    costs = CostModel(**profile)
    for wait_s in draw(st.lists(SECONDS, max_size=2)):
        costs.observe_return_wait(wait_s)
    return View(
        history,
        costs,
        draw(st.floats(-1.0, 1.0)),
        draw(st.floats(0.0, 1e4)),
        draw(PRESSURES),
        draw(st.none() | SECONDS),
        "cpu" if "reload" in profile else None,
    )


TURNS = st.builds(
    TurnFacts,
    program_id=st.just("p"),
    turn_index=st.integers(1, 1000),
    gap_key=st.sampled_from((*KEYS, GapKey("never seen"))),
    context_tokens=st.integers(1, 10**7),
    kv_blocks=st.integers(0, 10**6),
    requested_ttl_s=st.none() | SECONDS,
    tool_eta_s=st.none() | SECONDS,
)


@pytest.mark.parametrize("variant", VARIANTS)
@given(view=views(), turn=TURNS, waited_s=SECONDS, cap_s=st.floats(0.0, 1e4))
@settings(max_examples=50, deadline=None)
def test_ttls_lie_between_nothing_and_the_cap(variant, view, turn, waited_s, cap_s):
    name, options = VARIANTS[variant]
    config = {"policy": name, "policy_options": options, "max_ttl_s": cap_s}
    retention = FakeEngine(config).controller.retention
    for facts in (turn, turn._replace(waited_s=waited_s)):
        own = retention.policy.decide(facts, view)
        assert own.ttl_s >= 0.0  # not NaN
        assert not math.isnan(own.stall_wait_s)
    decided = retention._decide(turn, view)
    assert 0.0 <= decided.ttl_s <= cap_s
    # Of a gap that is longer than the cap already: less than nothing, so it ends.
    for is_end_known in (False, True):
        again = retention._redecide(turn, waited_s, view, is_end_known=is_end_known)
        assert again.ttl_s <= cap_s - waited_s
    assert not retention.telemetry.metrics.totals  # nobody raised, nobody was overruled
