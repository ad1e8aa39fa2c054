"""What ranks say of LMCache at start: refusals with their reasons, and one name."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is an extra")

from ttlcache.errors import ConfigError
from ttlcache_connector.tiers.lmcache import scheduler, worker
from ttlcache_connector.tiers.lmcache.client import Reconnects
from ttlcache_connector.tiers.lmcache.reports import StoreName


@pytest.fixture
def logged(monkeypatch, caplog):
    log = logging.getLogger("tests.lower_ranks")
    monkeypatch.setattr(worker, "log", log)
    monkeypatch.setattr(scheduler, "log", log)
    return caplog


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (RuntimeError("CUDA error: out of memory"), "refuses this model: CUDA error"),
        (ValueError("no such layout"), "refuses this model: no such layout"),
        (ConnectionError("nobody there"), "did not accept this worker"),
    ],
)
def test_why_a_registration_failed_is_logged_once(logged, raised, said):
    def register(_kv_caches: Any) -> None:
        raise raised

    half = object.__new__(worker.LMCacheWorkerTier)
    half._inner = SimpleNamespace(register_kv_caches=register)
    with pytest.raises(ConfigError, match=said):
        half.register({})
    (record,) = logged.records
    assert record.exc_info is not None
    assert record.exc_info[1] is raised


def halves(ranks: int) -> scheduler.LMCacheSchedulerTier:
    half = object.__new__(scheduler.LMCacheSchedulerTier)
    half._adapter = SimpleNamespace(
        model_name="model##ours", is_healthy=True, _heartbeats=None
    )
    half._reconnects = Reconnects(half._adapter)
    half._hints = SimpleNamespace(reconnect=lambda: None)
    half._ranks, half._is_split, half._was_up = ranks, False, True
    return half


def test_all_ranks_may_name_their_blocks_anew(logged):
    half = halves(2)
    half.on_handshake([StoreName("model"), StoreName("model")])
    assert half._adapter.model_name == "model"
    assert half.is_up()
    assert logged.records == []


@pytest.mark.parametrize("names", [["model"], ["model", "other"]])
def test_ranks_that_disagree_get_no_tier(logged, names):
    """One fell back to LMCache's code: no lookup would ever find all ranks' chunks."""
    half = halves(2)
    half.on_handshake([*map(StoreName, names)])
    assert not half.is_up()
    (record,) = logged.records
    assert "the lower tier is not used" in record.getMessage()


def test_a_server_that_came_back_while_nobody_asked_is_noticed():
    """It may be another one."""
    half = halves(1)
    beats = []
    heartbeat = SimpleNamespace(register_recover_callback=beats.append)
    half._adapter._heartbeats = {"server": heartbeat}
    assert half.is_up()
    assert half.generation == 0
    assert beats[-1](), "LMCache calls it healthy"
    assert half.is_up()
    assert half.generation == 1
    assert half.is_up()
    assert half.generation == 1
