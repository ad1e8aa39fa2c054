"""A worker's loads: when they begin, what they took."""

from types import SimpleNamespace

import pytest
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPWorkerMetadata

from tests.connector.conftest import fails
from ttlcache_connector import connector as connector_module
from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.role.worker import WorkerRole
from ttlcache_connector.tiers.base import TierMetadata, WorkerTier
from ttlcache_connector.tiers.lmcache.reports import WorkerReport, load_times

# --- when copies begin: before the step's forward pass, where that is right ----------


class Half(WorkerTier):
    """Writes down what it is called for."""

    def __init__(self):
        super().__init__()
        self.done = []
        self.on_load = lambda: None

    def load(self, metadata):
        self.done.append("load")
        self.on_load()

    def save(self, metadata):
        self.done.append("save")


def orders(*, stores_before_forward=True):
    return TierMetadata(inner=object(), stores_before_forward=stores_before_forward)


@pytest.mark.parametrize(
    ("loads_early", "stores_before_forward", "is_alone", "order"),
    [
        (True, True, True, ["load", "save", "forward"]),
        # What this step computes is stored after it.
        (True, False, True, ["load", "forward", "save"]),
        # Where new blocks are zeroed, loads come after that.
        (False, True, True, ["save", "forward", "load"]),
        # Beside another connector loads come after its flush.
        (True, True, False, ["save", "forward", "load"]),
    ],
)
def test_copies_begin_once_and_as_early_as_is_right(
    loads_early, stores_before_forward, is_alone, order
):
    half = Half()
    role = WorkerRole(half, zeroes_blocks=not loads_early)
    for _ in range(2):
        half.done.clear()
        metadata = orders(stores_before_forward=stores_before_forward)
        role.before_forward(metadata, is_alone=is_alone)
        half.done.append("forward")
        role.load(metadata)
        role.save(metadata)
        assert half.done == order


def test_a_load_that_fails_keeps_no_store():
    half = Half()
    half.on_load = fails
    role = WorkerRole(half, zeroes_blocks=False)
    role.before_forward(orders(), is_alone=True)
    assert half.done == ["load", "save"]
    assert role.faults.total == 1


def test_a_vllm_that_does_not_announce_its_steps_loses_nothing():
    half, metadata = Half(), orders()
    role = WorkerRole(half, zeroes_blocks=False)
    role.load(metadata)
    role.save(metadata)
    assert half.done == ["load", "save"]


@pytest.mark.parametrize("group", ["none", "ours", "another"])
def test_the_connector_says_whether_it_is_alone(monkeypatch, group):
    told = []
    ours = TTLConnector.__new__(TTLConnector)
    ours.worker_role = SimpleNamespace(
        before_forward=lambda metadata, is_alone: told.append(is_alone)
    )
    found = {"none": None, "ours": ours, "another": object()}[group]
    for name, answer in (("has", group != "none"), ("get", found)):
        monkeypatch.setattr(
            connector_module, f"{name}_kv_transfer_group", lambda answer=answer: answer
        )
    ours.handle_preemptions(TierMetadata())
    assert told == [group != "another"]


def test_the_slowest_rank_s_copy_counts():
    stores = LMCacheMPWorkerMetadata({"x": 1}, {"x"})
    first = WorkerReport.of(stores, {"a": 0.5, "b": 0.1})
    both = first.aggregate(WorkerReport.of(None, {"a": 0.7}))
    assert load_times(both) == {"a": 0.7, "b": 0.1}
    assert both.completed_store_requests == {"x": 1}
    assert both.failed_store_requests == {"x"}
    assert load_times(first.aggregate(stores)) == {"a": 0.5, "b": 0.1}
    assert load_times(stores) == {}
