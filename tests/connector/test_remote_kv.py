"""A request that waits for remote KV holds its blocks: the engine is not stalled."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tests.connector.conftest import FOREVER, HOLD_ALL, check, free, pinned
from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.plugin import SYNC_SCHEDULER

NAME = "TestLoadingConnector"


class LoadingConnector(TTLConnector):
    """Requests named "load…" find all but the last block of their prompt remotely."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        super().get_num_new_matched_tokens(request, num_computed_tokens)
        remote = (request.num_tokens - 1) // 16 * 16 - num_computed_tokens
        if request.request_id.startswith("load") and remote > 0:
            return remote, True
        return 0, False


@pytest.fixture
def engine(make_engine):
    with contextlib.suppress(ValueError):  # the fixture ran before
        KVConnectorFactory.register_connector(NAME, __name__, "LoadingConnector")
    return make_engine(
        num_blocks=40,
        kv_connector=NAME,
        scheduler_cls="ttlcache_connector.scheduler.TTLScheduler",
        extra_config={**FOREVER, "max_queue_wait_s": 1e6},
    )


def receive(engine, *request_ids):
    """The loads arrive, as a worker reports it."""
    output = engine.scheduler.schedule()
    assert not output.total_num_scheduled_tokens
    engine.scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=KVConnectorOutput(finished_recving=set(request_ids)),
        ),
    )


def test_pins_outlast_a_load_and_a_stalled_engine_still_takes_them(engine):
    # Scenario, 39 blocks:
    #   1. A's turn is pinned: 12 blocks.
    #   2. A request loads its KV: it holds its blocks, nothing runs.
    #   3. One that came later does not fit beside them. A is older: it waits.
    #   4. The load arrives and its request runs to its end.
    #   5. Then nothing else is there to wait for: A's pin gives way.
    engine.turn("A-1", range(200), hints={"program_id": "A", "tool": "x"})
    assert pinned(engine) == 12
    engine.add("load", range(1000, 1300), session_id="L")
    engine.step()
    assert engine.scheduler.requests["load"].status.name == "WAITING_FOR_REMOTE_KVS"
    assert free(engine) < 39 - 12
    engine.add("late", range(2000, 2480), session_id="N")  # 30 blocks and one more
    for _ in range(3):
        engine.step()
        assert pinned(engine) == 12
        assert not engine.scheduler.running
    receive(engine, "load")
    engine.run()
    assert list(engine.finished) == ["A-1", "load", "late"]
    check(engine)


def test_loads_that_arrived_do_not_keep_each_other_waiting(make_engine, engine):
    """Found by the bench's grid: nothing ran, two had their KV, pins held the rest."""
    # Scenario, 38 blocks:
    #   1. A runs; two requests load 12 blocks each.
    #   2. A grows to the 14 blocks that are left, ends, and is pinned with all of them.
    #   3. Both loads arrive. Each lacks a block; vLLM calls the second one loading
    #      until the first one runs. A is older than both.
    engine = make_engine(
        num_blocks=39,
        kv_connector=NAME,
        scheduler_cls="ttlcache_connector.scheduler.TTLScheduler",
        extra_config={**HOLD_ALL, "max_queue_wait_s": 1e6},
    )
    hints = {"program_id": "A", "tool": "x"}
    engine.add("A-1", range(160), hints=hints, max_tokens=65)
    engine.step()
    for index in (1, 2):
        start = 1000 * index
        engine.add(f"load-{index}", range(start, start + 193), session_id=f"{index}")
    engine.step()
    while "A-1" not in engine.finished:
        engine.step()
    assert pinned(engine) == 14
    assert free(engine) == 0
    receive(engine, "load-1", "load-2")
    engine.run()
    assert {"load-1", "load-2"} <= engine.finished.keys()
    check(engine)


def report(engine, **output):
    """What the worker says with the next step's output, and that step."""
    engine.worker_says = lambda: KVConnectorOutput(**output)
    engine.step()
    engine.worker_says = lambda: None


def first_block(engine, request_id):
    return engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0][0]


def is_loading(engine, request_id):
    request = engine.scheduler.requests[request_id]
    return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_a_load_that_failed_is_not_in_its_own_way(make_engine, engine):
    """Found by `bench wedge`: vLLM reserved for it what it had given back."""
    engine = make_engine(num_blocks=24, kv_connector=NAME, scheduler_cls=SYNC_SCHEDULER)
    engine.scheduler.recompute_kv_load_failures = True
    engine.add("load", range(193))  # 13 of 23 blocks
    engine.step()
    bad = first_block(engine, "load")
    report(engine, finished_recving={"load"}, invalid_block_ids={bad})
    engine.step()
    engine.step()
    assert free(engine) == 23 - 12
    assert is_loading(engine, "load")
    report(engine, finished_recving={"load"})
    engine.run()
    assert "load" in engine.finished
    check(engine)


def test_a_load_that_failed_is_in_nobodys_way(engine):
    # Scenario, 39 blocks:
    #   1. Two requests load 12 blocks each, a third one grows to the other 15.
    #   2. One load fails and does not fit any more; the other arrives.
    engine.scheduler.recompute_kv_load_failures = True
    engine.add("runs", range(160), max_tokens=140)
    engine.step()
    for index in (1, 2):
        engine.add(f"load-{index}", range(1000 * index, 1000 * index + 193))
    while free(engine):
        engine.step()
    bad = first_block(engine, "load-1")
    arrived = {"load-1", "load-2"}
    report(engine, finished_recving=arrived, invalid_block_ids={bad})
    while "load-2" not in engine.finished:
        engine.step()
    assert "runs" not in engine.finished
    while not is_loading(engine, "load-1"):
        engine.step()
    report(engine, finished_recving={"load-1"})
    engine.run()
    check(engine)
