"""Policies by name: creation, options, errors, outside policies."""

import pytest

from ttlcache import policies
from ttlcache.errors import ConfigError
from ttlcache.policies.base import Policy
from ttlcache.types import Decision

NAMES = ("none", "fixed", "ski-rental", "cachettl", "adaptive", "observe")


class Outside(Policy):
    name = "outside"

    def decide(self, turn, view):
        return Decision(0.0, "outside")


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(policies, "_TARGETS", dict(policies._TARGETS))


def test_every_name_loads_the_class_of_that_name():
    assert policies.names()[: len(NAMES)] == NAMES
    for name in NAMES:
        assert policies.create(name).name == name


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cachetll", {}, ["'cachetll'", "mean 'cachettl'", *NAMES]),
        ("", {}, ["''", *NAMES]),
        ("fixed", {"ttl": 1}, ["'fixed'", "'ttl'", "mean 'ttl_s'"]),
        ("fixed", {"ttl_s": -1}, ["'ttl_s'", "'fixed'", "-1", "greater than"]),
        ("fixed", {"ttl_s": "soon"}, ["'ttl_s'", "'soon'", "number"]),
        ("fixed", {"ttl_s": float("nan")}, ["'ttl_s'", "nan"]),
        ("none", {"x": 1}, ["'none'", "'x'"]),
        ("cachettl", {"k": 1.5}, ["'k'", "1.5", "integer"]),
        ("adaptive", {"reprice": False}, ["'adaptive'", "'reprice'"]),
        ("fixed", {"ttl_s": -1, "x": 0}, ["'ttl_s'", "'x'"]),
    ],
)
def test_errors_name_key_value_and_expectation(name, options, words):
    with pytest.raises(ConfigError) as caught:
        policies.create(name, options)
    assert caught.value.__cause__ is None
    for word in words:
        assert word in str(caught.value)


def test_an_outside_policy_can_be_registered():
    policies.register("outside", f"{__name__}:Outside")
    policies.register("outside", f"{__name__}:Outside")  # twice is no error
    assert "outside" in policies.names()
    assert policies.create("outside").name == "outside"


def test_registering_needs_a_free_name_and_a_full_target():
    with pytest.raises(ConfigError, match="'fixed' is taken"):
        policies.register("fixed", "elsewhere:Fixed")
    for target in ("module", "module:", ":Class", ""):
        with pytest.raises(ConfigError, match=r"expected 'package\.module:Class'"):
            policies.register("mine", target)
    policies.register("bad", "ttlcache.estimators.costs:CostModel")
    with pytest.raises(ConfigError, match="not a subclass of Policy"):
        policies.create("bad")
