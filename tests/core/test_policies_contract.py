"""The public contract suite on every registered policy, and on wrong ones."""

from __future__ import annotations

import math

import pytest

from tests.core import test_policies_adaptive  # noqa: F401 - registers its own
from ttlcache import policies
from ttlcache.policies.base import Policy, View
from ttlcache.testing.policy_contract import PolicyContract
from ttlcache.types import Decision, TurnFacts

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    **{name: (name, {}) for name in policies.SHIPPED},
    "fixed-forever": ("fixed", {"ttl_s": math.inf}),
    "cachettl-k0": ("cachettl", {"k": 0}),
    "adaptive-eager": ("test-adaptive-eager", {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
class TestEveryPolicy(PolicyContract):
    @pytest.fixture(autouse=True)
    def _choose(self, variant: str) -> None:
        self.variant = variant

    def make_policy(self) -> Policy:
        return policies.create(*VARIANTS[self.variant])


class Wrong(Policy):
    name = "wrong"

    def __init__(self, *answers: Decision) -> None:
        super().__init__()
        self._answers = answers
        self._calls = 0

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        self._calls += 1
        return self._answers[self._calls % len(self._answers)]


@pytest.mark.parametrize(
    "answers",
    [
        [Decision(math.nan, "nan")],
        [Decision(-1.0, "negative")],
        [Decision(1.0, "")],
        [Decision(1.0, "odd inputs", {"text": "x"})],  # type: ignore[dict-item]
    ],
)
def test_the_suite_catches_wrong_answers(answers: list[Decision]) -> None:
    class Suite(PolicyContract):
        def make_policy(self) -> Policy:
            return Wrong(*answers)

    with pytest.raises(AssertionError):
        Suite().test_empty_history()


def test_the_suite_catches_impurity() -> None:
    class Suite(PolicyContract):
        def make_policy(self) -> Policy:
            return Wrong(*(Decision(float(i), "counts") for i in range(7)))

    with pytest.raises(AssertionError):
        Suite().test_same_inputs_give_the_same_answer()
