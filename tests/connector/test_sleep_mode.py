"""What vLLM asks of the connector's class: sleep (since 0.33), and the layout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_layout import KVCacheLayout

from ttlcache_connector.connector import TTLConnector

TIER = {"lower_tier": "lmcache"}
BY_SERVER = {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}


def may_sleep(extra):
    config = KVTransferConfig(
        kv_connector="TTLConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    return TTLConnector.supports_sleep_mode(config)


@pytest.mark.parametrize(
    ("extra", "may"),
    [
        ({}, True),
        (TIER, True),
        (BY_SERVER, True),  # of nothing: there is no tier
        (TIER | BY_SERVER, False),
        (TIER | {"lmcache.mp.mp_transfer_mode": "LMCACHE_DRIVEN"}, False),
        (TIER | {"lmcache.mp.use_vmm_api": True}, False),
        (TIER | {"lmcache.mp.use_vmm_api": False}, True),
    ],
)
def test_no_sleep_where_a_server_has_mapped_the_kv_cache(extra, may):
    assert may_sleep(extra) is may


def test_the_environment_may_say_it(monkeypatch):
    monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", "lmcache_driven")
    assert not may_sleep(TIER)
    assert may_sleep(TIER | {"lmcache.mp.mp_transfer_mode": "auto"})
    assert may_sleep({})


@pytest.mark.parametrize(
    ("tier", "device", "layout"),
    [("cpu", "cuda", "BLNHC"), ("cpu", "cpu", None), ("none", "cuda", None)],
)
def test_the_cpu_tier_asks_for_blocks_in_one_piece(tier, device, layout):
    transfer = SimpleNamespace(kv_connector_extra_config={"lower_tier": tier})
    config = SimpleNamespace(
        kv_transfer_config=transfer, device_config=SimpleNamespace(device_type=device)
    )
    asked = TTLConnector.get_required_kvcache_layout(config)
    assert asked == layout
    if asked is not None:
        assert KVCacheLayout[asked].is_block_outermost
