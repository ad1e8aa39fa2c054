"""What a user's flags do before any engine runs."""

import sys
from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.connector.conftest import VLLM_OWN
from tests.connector.test_vllm_options import TTL, multi
from ttlcache.errors import ConfigError, UnsupportedEngineError
from ttlcache_connector import plugin
from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.engine import requirements
from ttlcache_sim.harness import EngineHarness, EngineSpec, build_vllm_config


@pytest.mark.parametrize(
    ("spec", "scheduler_cls", "connector_cls"),
    [
        (EngineSpec(), plugin.SYNC_SCHEDULER, TTLConnector),
        (EngineSpec(scheduler_cls=VLLM_OWN), VLLM_OWN, TTLConnector),
        (EngineSpec(connector=False), None, None),
    ],
    ids=["the flag alone is enough", "the user's scheduler stays", "without us"],
)
def test_what_is_put_into_vllms_configuration(spec, scheduler_cls, connector_cls):
    config = build_vllm_config(spec)
    assert config.scheduler_config.scheduler_cls == scheduler_cls
    transfer = config.kv_transfer_config
    named = transfer and KVConnectorFactory.get_connector_class(transfer)
    assert named is connector_cls


def test_registering_twice_changes_nothing():
    before = EngineArgs.create_engine_config
    plugin.register()
    plugin.register()
    assert EngineArgs.create_engine_config is before


@pytest.mark.parametrize(
    "extra",
    [
        {"polcy": "x"},
        {"ordering": "no_such_module:Class"},
        {"record_path": "FILE"},
    ],
)
def test_wrong_settings_are_named_before_vllm_looks_at_the_model(
    extra, tmp_path, monkeypatch
):
    # Offline vLLM asks for the model where its arguments are made, before any plugin.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (tmp_path / "file").touch()
    places = {"FILE": str(tmp_path / "file")}
    extra = {key: places.get(value, value) for key, value in extra.items()}
    model = {"model": str(tmp_path / "no such model")}
    with pytest.raises(ConfigError, match=next(iter(extra))):
        build_vllm_config(EngineSpec(extra_config=extra, engine_args=model))


def test_an_error_of_ours_that_ends_the_process_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            build_vllm_config(EngineSpec(extra_config={"polcy": "x"}))
    sys.excepthook(caught.type, caught.value, caught.tb)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ttlcache: ")
    assert "did you mean 'policy'" in line
    assert sys.excepthook is sys.__excepthook__
    sys.excepthook(ValueError, ValueError("another's"), None)
    assert "ValueError: another's" in capsys.readouterr().err


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
    with pytest.raises(ConfigError, match="polcy"):
        build_vllm_config(multi(TTL | {"kv_connector_extra_config": {"polcy": "x"}}))


# --- what vLLM asks of the connector's class: sleep (since 0.33), and the layout ------

TIER = {"lower_tier": "lmcache"}
MODE = "lmcache.mp.mp_transfer_mode"
BY_SERVER = {MODE: "lmcache_driven"}


@pytest.mark.parametrize(
    ("extra", "environment", "may"),
    [
        ({}, None, True),
        (TIER, None, True),
        (BY_SERVER, None, True),  # of nothing: there is no tier
        (TIER | BY_SERVER, None, False),
        (TIER | {MODE: "LMCACHE_DRIVEN"}, None, False),
        (TIER | {"lmcache.mp.use_vmm_api": True}, None, False),
        (TIER | {"lmcache.mp.use_vmm_api": False}, None, True),
        (TIER, "lmcache_driven", False),
        (TIER | {MODE: "auto"}, "lmcache_driven", True),
        ({}, "lmcache_driven", True),
    ],
)
def test_no_sleep_where_a_server_has_mapped_the_kv_cache(
    monkeypatch, extra, environment, may
):
    if environment is not None:
        monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", environment)
    config = KVTransferConfig(**TTL, kv_connector_extra_config=extra)
    assert TTLConnector.supports_sleep_mode(config) is may


@pytest.mark.parametrize(
    ("tier", "device", "layout"),
    [
        ("cpu", "cuda", "BLNHC"),
        ("cpu", "cuda 10.x", "BLHNC"),
        ("cpu", "cpu", None),
        ("none", "cuda", None),
    ],
)
def test_the_cpu_tier_asks_for_blocks_in_one_piece(monkeypatch, tier, device, layout):
    if device == "cuda 10.x":
        device = "cuda"
        family = "is_device_capability_family"
        monkeypatch.setattr(current_platform, family, lambda it: it == 100)
    transfer = SimpleNamespace(kv_connector_extra_config={"lower_tier": tier})
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        device_config=SimpleNamespace(device_type=device),
        additional_config={},
    )
    asked = TTLConnector.get_required_kvcache_layout(config)
    assert asked == layout
    if asked is not None:
        assert KVCacheLayout[asked].is_block_outermost


def test_beside_other_connectors_theirs_is_the_layout(monkeypatch):
    cpu = TTL | {"kv_connector_extra_config": {"lower_tier": "cpu", "cpu_gb": 0.01}}
    offloading = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    config = build_vllm_config(multi(cpu, offloading))
    monkeypatch.setattr(config.device_config, "device_type", "cuda")
    connector = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    assert connector.get_required_kvcache_layout(config) == "LBHNC"
