"""When a worker's copies begin: before the step's forward pass, where that is right."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from ttlcache_connector import connector as connector_module
from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.tiers.base import TierMetadata
from ttlcache_connector.tiers.lmcache.worker import LMCacheWorkerTier


class Half(LMCacheWorkerTier):
    """Our order of calls around LMCache's, which are written down."""

    def __init__(self, *, loads_early=True, fails=False):
        self.done = []
        self._inner = SimpleNamespace(
            handle_preemptions=lambda _: self.done.append("flush")
        )
        self._loads_early = loads_early
        self._loaded = self._stored = None
        self._fails = fails

    def _load(self, metadata):
        self.done.append("load")
        if self._fails:
            raise RuntimeError("no load")

    def _save(self, metadata):
        self.done.append("save")

    def step(self, metadata, is_alone=True):
        self.before_forward(metadata, is_alone=is_alone)
        self.done.append("forward")
        self.load(metadata)
        self.save(metadata)
        return self.done


def orders(*, is_past):
    return TierMetadata(inner=object(), is_past=is_past)


@pytest.mark.parametrize(
    ("loads_early", "is_past", "is_alone", "order"),
    [
        (True, True, True, ["flush", "load", "save", "forward"]),
        # What this step computes is stored after it.
        (True, False, True, ["flush", "load", "forward", "save"]),
        # Where new blocks are zeroed, loads come after that.
        (False, True, True, ["flush", "save", "forward", "load"]),
        # Beside another connector loads come after its flush.
        (True, True, False, ["flush", "save", "forward", "load"]),
    ],
)
def test_copies_begin_once_and_as_early_as_is_right(
    loads_early, is_past, is_alone, order
):
    half = Half(loads_early=loads_early)
    for _ in range(2):
        half.done.clear()
        assert half.step(orders(is_past=is_past), is_alone) == order


def test_a_load_that_fails_keeps_no_store():
    half = Half(fails=True)
    with pytest.raises(RuntimeError, match="no load"):
        half.before_forward(orders(is_past=True), is_alone=True)
    assert half.done == ["flush", "load", "save"]


def test_a_vllm_that_does_not_announce_its_steps_loses_nothing():
    half, metadata = Half(), orders(is_past=True)
    half.load(metadata)
    half.save(metadata)
    assert half.done == ["load", "save"]


@pytest.mark.parametrize("group", ["none", "ours", "another"])
def test_the_connector_says_whether_it_is_alone(monkeypatch, group):
    told = []
    ours = TTLConnector.__new__(TTLConnector)
    ours.worker_role = SimpleNamespace(
        before_forward=lambda metadata, is_alone: told.append(is_alone)
    )
    members = {"none": None, "ours": ours, "another": object()}
    monkeypatch.setattr(
        connector_module, "has_kv_transfer_group", lambda: group != "none"
    )
    monkeypatch.setattr(
        connector_module, "get_kv_transfer_group", lambda: members[group]
    )
    ours.handle_preemptions(TierMetadata())
    assert told == [group != "another"]
