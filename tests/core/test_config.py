import math

import pytest

from ttlcache.config import (
    TTLCacheConfig,
    admission_in_force,
    load_config,
    ordering_in_force,
)
from ttlcache.errors import ConfigError
from ttlcache.scheduling.admission import AdmissionControl, GrowthReserve, create

#: For every key: values of a wrong type, then values out of range.
WRONG = {
    "policy": ([1, None, True, ["fixed"]], ["no-such-policy", ""]),
    "policy_options": ([1, "ttl_s=2", None, [("ttl_s", 2)]], []),
    "ordering": ([1, None, True], ["fifo", "", "TTL-AWARE", ":Class", "module:"]),
    "admission": ([1, None, True], ["all", "", "working-set"]),
    "max_pinned_fraction": (["0.5", None, True], [-0.1, 1.1, math.nan]),
    "max_ttl_s": (["300", None, True, [1]], [-1.0, math.inf, math.nan]),
    "quantum_turns": (["16", True, 1.5], [0, -1]),
    "max_queue_wait_s": (["120", True], [0, -1.0, math.inf]),
    "program_idle_s": (["900", None, True], [0, -1, math.inf, math.nan]),
    "tool_call_parser": ([1, True, ["hermes"]], []),
    "lower_tier": ([1, None, True], ["disk", "", "LMCache"]),
    "cpu_gb": (["8", True], [0.0, -1.0, math.inf, math.nan]),
    "demote": ([1, None, True], ["expiry", ""]),
    "record_path": ([1, True, ["p"]], []),
    "allow_untested_vllm": (["true", 1, None], []),
}
CASES = [
    (key, value)
    for key, (wrong_types, out_of_range) in WRONG.items()
    for value in [*wrong_types, *out_of_range]
]


def test_every_key_is_tested_and_described():
    fields = TTLCacheConfig.model_fields
    assert set(WRONG) == set(fields)
    assert all(field.description for field in fields.values())


@pytest.mark.parametrize(("key", "value"), CASES)
def test_a_wrong_value_names_key_and_value(key, value):
    with pytest.raises(ConfigError) as caught:
        load_config({key: value})
    assert key in str(caught.value)
    assert repr(value) in str(caught.value)


def test_a_lower_tier_reads_its_own_keys():
    raw = {"lower_tier": "lmcache", "lmcache.mp.port": 5555}
    assert load_config(raw).lower_tier == "lmcache"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"max_ttl_s": -1}, ["greater than or equal to 0", "Upper bound of every TTL"]),
        ({"ordering": "plas"}, ["'plas', expected: one of auto, ", "module:Class"]),
        ({"policy": "fixd"}, ["did you mean 'fixed'"]),
        ({"policy": "fixed", "policy_options": {"ttl": 2}}, ["'ttl'", "ttl_s"]),
        ({"lmcache.mp.port": 5555}, ["'lmcache.mp.port'", "no effect"]),
        # Typos are told the nearest key, and what is like none all of them.
        ({"polcy": 1}, ["unknown key 'polcy'", "did you mean 'policy'?"]),
        ({"max_ttl": 1}, ["unknown key 'max_ttl'", "did you mean 'max_ttl_s'?"]),
        ({"recordpath": 1}, ["did you mean 'record_path'?"]),
        ({"program_idel_s": 1}, ["did you mean 'program_idle_s'?"]),
        ({"zzzzzz": 1}, ["valid keys: policy, policy_options"]),
        ({"history_path": 1}, ["valid keys: policy, policy_options"]),
        ({5: 1}, []),
        # All mistakes at once.
        ({"polcy": "fixed", "max_ttl_s": "5"}, ["polcy", "max_ttl_s"]),
        # Admission needs an order in which newcomers come last.
        *(
            ({"admission": "room-to-grow", "ordering": order}, ["'admission'", order])
            for order in ("request-fcfs", "somebodys.module:Order")
        ),
    ],
)
def test_the_message_says_what_was_expected(raw, words):
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    for word in words:
        assert word in str(caught.value)


def test_outputs_are_read_unless_the_parser_is_none():
    assert TTLCacheConfig().reads_outputs
    assert load_config({"tool_call_parser": "hermes"}).reads_outputs
    assert not load_config({"tool_call_parser": "none"}).reads_outputs


TIER = {"lower_tier": "lmcache"}


@pytest.mark.parametrize(
    ("settings", "ordering", "admission"),
    [
        ({}, "expected-finish", "room-to-grow"),
        ({"ordering": "program-fcfs"}, "program-fcfs", "room-to-grow"),
        ({"ordering": "ttl-aware"}, "ttl-aware", "room-to-grow"),
        ({"policy": "cachettl"}, "ttl-aware", "none"),
        ({"admission": "none"}, "expected-finish", "none"),
        (TIER, "expected-finish", "none"),
        # The paper's order is the same above a tier.
        (TIER | {"policy": "cachettl"}, "ttl-aware", "none"),
        (TIER | {"ordering": "ttl-aware"}, "ttl-aware", "none"),
        (TIER | {"admission": "room-to-grow"}, "expected-finish", "room-to-grow"),
        (
            {"policy": "cachettl", "admission": "room-to-grow"},
            "ttl-aware",
            "room-to-grow",
        ),
    ],
)
def test_auto_depends_on_the_policy_and_the_lower_tier(settings, ordering, admission):
    config = load_config(settings)
    assert ordering_in_force(config) == ordering
    assert admission_in_force(config) == admission
    kind = GrowthReserve if admission == "room-to-grow" else AdmissionControl
    assert type(create(config, block_tokens=4)) is kind
