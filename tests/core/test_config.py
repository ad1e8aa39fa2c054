from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from ttlcache.config import (
    TTLCacheConfig,
    admission_in_force,
    load_config,
    ordering_in_force,
)
from ttlcache.errors import ConfigError, TTLCacheError

#: For every key: values of a wrong type, then values out of range.
WRONG = {
    "policy": ([1, None, True, ["fixed"]], ["no-such-policy", ""]),
    "policy_options": ([1, "ttl_s=2", None, [("ttl_s", 2)]], [{"no_such": 1}]),
    "ordering": ([1, None, True], ["fifo", "", "TTL-AWARE", ":Class", "module:"]),
    "admission": ([1, None, True], ["all", "", "working-set"]),
    "max_pinned_fraction": (["0.5", None, True], [-0.1, 1.1, math.nan]),
    "max_ttl_s": (["300", None, True, [1]], [-1.0, math.inf, math.nan]),
    "quantum_turns": (["16", True, 1.5], [0, -1]),
    "max_queue_wait_s": (["120", None, True], [0, -1.0, math.inf]),
    "program_idle_s": (["900", None, True], [0, -1, math.inf, math.nan]),
    "tool_call_parser": ([1, True, ["hermes"]], []),
    "lower_tier": ([1, None, True], ["disk", "", "LMCache"]),
    "cpu_gb": (["8", None, True], [0.0, -1.0, math.inf, math.nan]),
    "demote": ([1, None, True], ["expiry", ""]),
    "state_dir": ([1, True, ["p"]], []),
    "record_path": ([1, True, ["p"]], []),
    "allow_untested_vllm": (["true", 1, None], []),
}
CASES = [
    (key, value)
    for key, (wrong_types, out_of_range) in WRONG.items()
    for value in [*wrong_types, *out_of_range]
]


def test_defaults_need_no_configuration():
    assert load_config(None) == load_config({}) == TTLCacheConfig()
    assert TTLCacheConfig().policy == "adaptive"
    assert ordering_in_force(TTLCacheConfig()) == "ttl-aware"


def test_every_key_is_tested_and_described():
    fields = TTLCacheConfig.model_fields
    assert set(WRONG) == set(fields)
    assert all(field.description for field in fields.values())


@pytest.mark.parametrize(("key", "value"), CASES)
def test_a_wrong_value_names_key_and_value(key, value):
    with pytest.raises(ConfigError) as caught:
        load_config({key: value})
    text = str(caught.value)
    if key == "policy_options" and isinstance(value, dict):
        assert "no_such" in text
    else:
        assert key in text
        assert repr(value) in text


def test_a_lower_tier_reads_its_own_keys():
    raw = {"lower_tier": "lmcache", "lmcache.mp.port": 5555}
    assert load_config(raw).lower_tier == "lmcache"
    with pytest.raises(ConfigError, match=r"'lmcache\.mp\.port'.*no effect"):
        load_config({"lmcache.mp.port": 5555})


def test_the_message_says_what_was_expected():
    with pytest.raises(ConfigError, match="greater than or equal to 0") as caught:
        load_config({"max_ttl_s": -1})
    assert "Upper bound of every TTL" in str(caught.value)


def test_an_unknown_policy_and_an_unknown_option_stop_the_server():
    with pytest.raises(ConfigError, match="did you mean 'fixed'"):
        load_config({"policy": "fixd"})
    with pytest.raises(ConfigError, match="ttl_s"):
        load_config({"policy": "fixed", "policy_options": {"ttl": 2}})


def test_integers_are_fine_for_seconds_and_shares():
    config = load_config({"max_ttl_s": 60, "max_pinned_fraction": 1})
    assert config.max_ttl_s == 60.0
    assert config.max_pinned_fraction == 1.0


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("polcy", "policy"),
        ("max_ttl", "max_ttl_s"),
        ("statedir", "state_dir"),
        ("program_idel_s", "program_idle_s"),
    ],
)
def test_a_misspelt_key_is_told_the_nearest(typo, meant):
    with pytest.raises(ConfigError, match=f"unknown key '{typo}'") as caught:
        load_config({typo: 1})
    assert f"did you mean '{meant}'?" in str(caught.value)


@pytest.mark.parametrize("key", ["zzzzzz", "profile_path", "history_path"])
def test_a_key_like_no_other_is_told_all_of_them(key):
    with pytest.raises(ConfigError, match="valid keys: policy, policy_options"):
        load_config({key: 1})


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config({"polcy": "fixed", "max_ttl_s": "5"})
    text = str(caught.value)
    assert "polcy" in text
    assert "max_ttl_s" in text


def test_a_key_that_is_no_string_is_an_error_of_ours_too():
    with pytest.raises(ConfigError):
        load_config({5: 1})


def test_config_errors_are_value_errors_of_our_tree():
    with pytest.raises(ValueError):
        load_config({"policy": 1})
    assert issubclass(ConfigError, TTLCacheError)


def test_outputs_are_read_unless_the_parser_is_none():
    assert TTLCacheConfig().reads_outputs
    assert load_config({"tool_call_parser": "hermes"}).reads_outputs
    assert not load_config({"tool_call_parser": "none"}).reads_outputs


def test_a_config_is_frozen():
    with pytest.raises(ValidationError):
        TTLCacheConfig().policy = "none"


def test_admission_needs_an_order_in_which_newcomers_come_last():
    for ordering in ("request-fcfs", "weighted-arrival", "somebodys.module:Order"):
        with pytest.raises(ConfigError, match=f"'admission'.*'{ordering}'"):
            load_config({"admission": "room-to-grow", "ordering": ordering})
    load_config({"admission": "room-to-grow", "ordering": "ttl-aware"})


def test_an_unknown_ordering_is_told_what_there_is():
    expected = r"'ordering' has value 'plas', expected: one of auto, .*module:Class"
    with pytest.raises(ConfigError, match=expected):
        load_config({"ordering": "plas"})


@pytest.mark.parametrize(
    ("settings", "ordering", "admission"),
    [
        ({}, "ttl-aware", "room-to-grow"),
        ({"lower_tier": "lmcache"}, "weighted-arrival", "none"),
        # The paper's order is the same above a tier.
        ({"lower_tier": "lmcache", "policy": "cachettl"}, "ttl-aware", "none"),
        (
            {"lower_tier": "lmcache", "ordering": "ttl-aware"},
            "ttl-aware",
            "room-to-grow",
        ),
        (
            {"lower_tier": "lmcache", "admission": "room-to-grow"},
            "ttl-aware",
            "room-to-grow",
        ),
    ],
)
def test_auto_depends_on_the_policy_and_the_lower_tier(settings, ordering, admission):
    config = load_config(settings)
    assert ordering_in_force(config) == ordering
    assert admission_in_force(config) == admission
