"""What a user's flags do before any engine runs."""

from __future__ import annotations

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

from bench.sim.harness import EngineHarness, EngineSpec, build_vllm_config
from ttlcache.errors import ConfigError, UnsupportedEngineError
from ttlcache_connector import plugin
from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.engine import requirements


def test_the_flag_alone_is_enough():
    config = build_vllm_config(EngineSpec())
    assert config.scheduler_config.scheduler_cls == plugin.SYNC_SCHEDULER
    cls = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    assert cls is TTLConnector


def test_registering_twice_changes_nothing():
    before = EngineArgs.create_engine_config
    plugin.register()
    plugin.register()
    assert EngineArgs.create_engine_config is before


def test_servers_without_our_connector_are_left_alone():
    config = build_vllm_config(EngineSpec(connector=False))
    assert config.scheduler_config.scheduler_cls is None
    assert config.kv_transfer_config is None


def test_a_scheduler_that_the_user_named_stays():
    name = "vllm.v1.core.sched.scheduler.Scheduler"
    config = build_vllm_config(EngineSpec(scheduler_cls=name))
    assert config.scheduler_config.scheduler_cls == name


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"polcy": "x"}, ["'polcy'", "did you mean 'policy'"]),
        ({"policy": "cachettll"}, ["cachettll", "cachettl"]),
        ({"policy": 3}, ["'policy'", "3", "string"]),
        ({"max_ttl_s": "long"}, ["'max_ttl_s'", "'long'", "number"]),
        ({"max_ttl_s": -1.0}, ["'max_ttl_s'", "-1.0", "greater than or equal to 0"]),
        ({"max_pinned_fraction": 2.0}, ["'max_pinned_fraction'", "less than or equal"]),
        ({"policy": "fixed", "policy_options": {"tttl": 1}}, ["tttl"]),
        ({"ordering": "random"}, ["'ordering'", "'random'", "ttl-aware"]),
    ],
)
def test_wrong_settings_stop_the_server_and_say_why(extra, expected):
    with pytest.raises(ConfigError) as caught:
        build_vllm_config(EngineSpec(extra_config=extra))
    for part in expected:
        assert part in str(caught.value)


def test_prefix_caching_off_is_refused():
    with pytest.raises(ConfigError, match="prefix caching"):
        build_vllm_config(EngineSpec(engine_args={"enable_prefix_caching": False}))


def test_untested_vllm_is_refused_unless_overridden(monkeypatch):
    monkeypatch.setattr(requirements, "vllm_version", lambda: "0.99.1")
    with pytest.raises(UnsupportedEngineError, match=r"0\.99\.1.*allow_untested_vllm"):
        build_vllm_config(EngineSpec())
    config = build_vllm_config(EngineSpec(extra_config={"allow_untested_vllm": True}))
    assert config.scheduler_config.scheduler_cls == plugin.SYNC_SCHEDULER


def test_our_scheduler_without_our_connector_says_what_to_do(clock):
    spec = EngineSpec(connector=False, scheduler_cls=plugin.SYNC_SCHEDULER)
    with pytest.raises(ValueError, match="kv-transfer-config"):
        EngineHarness(spec)


def test_inside_a_multi_connector_the_settings_are_checked_too():
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "connectors": [
                {
                    "kv_connector": "TTLConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"polcy": "x"},
                }
            ]
        },
    )
    with pytest.raises(ConfigError, match="polcy"):
        build_vllm_config(
            EngineSpec(connector=False, engine_args={"kv_transfer_config": transfer})
        )
