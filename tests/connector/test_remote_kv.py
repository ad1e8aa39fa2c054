"""Beside loads of remote KV: ours, or those of another one in `MultiConnector`."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.connector.conftest import (
    HOLD_5S,
    HOLD_ALL,
    Engine,
    check,
    free,
    pinned,
    totals,
)
from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.plugin import SYNC_SCHEDULER
from ttlcache_sim.harness import EngineSpec

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
def make(make_engine):
    with contextlib.suppress(ValueError):  # the fixture ran before
        KVConnectorFactory.register_connector(NAME, __name__, "LoadingConnector")

    def make(num_blocks=40):
        engine = make_engine(
            num_blocks=num_blocks,
            kv_connector=NAME,
            scheduler_cls=SYNC_SCHEDULER,
            extra_config={**HOLD_ALL, "max_queue_wait_s": 1e6},
        )
        engine.scheduler.recompute_kv_load_failures = True
        return engine

    return make


def report(engine, **output):
    """What the worker says with the next step's output, and that step."""
    engine.worker_says = lambda: KVConnectorOutput(**output)
    engine.step()
    engine.worker_says = lambda: None


def load_two(engine):
    """Twelve blocks each."""
    for index in (1, 2):
        prompt = range(1000 * index, 1000 * index + 193)
        engine.add(f"load-{index}", prompt, session_id=f"{index}")
    engine.step()


def is_loading(engine, request_id):
    request = engine.scheduler.requests[request_id]
    return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_pins_outlast_a_load_and_a_stalled_engine_still_takes_them(make):
    # Scenario, 39 blocks:
    #   1. A's turn is pinned: 12 blocks.
    #   2. A request loads its KV: it holds its blocks, nothing runs.
    #   3. One that came later does not fit beside them. A is older: it waits.
    #   4. The load arrives and its request runs to its end.
    #   5. Then nothing else is there to wait for: A's pin gives way.
    engine = make()
    engine.turn("A-1", range(200), hints={"program_id": "A", "tool": "x"})
    assert pinned(engine) == 12
    engine.add("load", range(1000, 1300), session_id="L")
    engine.step()
    assert is_loading(engine, "load")
    assert free(engine) < 39 - 12
    engine.add("late", range(2000, 2480), session_id="N")  # 30 blocks and one more
    for _ in range(3):
        engine.step()
        assert pinned(engine) == 12
        assert not engine.scheduler.running
    report(engine, finished_recving={"load"})
    engine.run()
    assert list(engine.finished) == ["A-1", "load", "late"]
    check(engine)


def test_loads_that_arrived_do_not_keep_each_other_waiting(make):
    """Found by the bench's grid: nothing ran, two had their KV, pins held the rest."""
    # Scenario, 38 blocks:
    #   1. A runs; two requests load 12 blocks each.
    #   2. A grows to the 14 blocks that are left, ends, and is pinned with all of them.
    #   3. Both loads arrive. Each lacks a block; vLLM calls the second one loading
    #      until the first one runs. A is older than both.
    engine = make(num_blocks=39)
    hints = {"program_id": "A", "tool": "x"}
    engine.add("A-1", range(160), hints=hints, max_tokens=65)
    engine.step()
    load_two(engine)
    while "A-1" not in engine.finished:
        engine.step()
    assert pinned(engine) == 14
    assert free(engine) == 0
    parts = engine.connector.scheduler_role.parts
    (pin,), prefills = parts.controller.pins, parts.prefills
    pin.stall_until_s = pin.deadline_s  # an engine with nothing to run would wait
    assert prefills.is_loading()
    report(engine, finished_recving={"load-1", "load-2"})
    assert is_loading(engine, "load-2"), "by vLLM's account"
    assert not prefills.is_loading()
    engine.step()
    assert engine.scheduler.running, "no turn can pass the loads"
    engine.run()
    assert {"load-1", "load-2"} <= engine.finished.keys()
    check(engine)


def test_a_load_that_failed_is_not_in_its_own_way(make):
    """Found by `bench wedge`: vLLM reserved for it what it had given back."""
    engine = make(num_blocks=24)
    engine.add("load", range(193))  # 13 of 23 blocks
    engine.step()
    report(engine, finished_recving={"load"}, failed_recving={"load"})
    engine.step()
    engine.step()
    assert free(engine) == 23 - 12
    assert is_loading(engine, "load")
    report(engine, finished_recving={"load"})
    engine.run()
    assert "load" in engine.finished
    check(engine)


def test_a_load_that_failed_is_in_nobodys_way(make):
    # A third request grows to the 15 blocks that two loads leave; one load fails.
    engine = make()
    engine.add("runs", range(160), max_tokens=140)
    engine.step()
    load_two(engine)
    while free(engine):
        engine.step()
    arrived = {"load-1", "load-2"}
    report(engine, finished_recving=arrived, failed_recving={"load-1"})
    while "load-2" not in engine.finished:
        engine.step()
    assert "runs" not in engine.finished
    while not is_loading(engine, "load-1"):
        engine.step()
    report(engine, finished_recving={"load-1"})
    engine.run()
    check(engine)


# --- `MultiConnector [TTLConnector, another one]`: pins above anybody's lower tier


def common(a: list[int], b: list[int]) -> int:
    """Tokens with which both begin."""
    alike = (one == other for one, other in zip(a, b, strict=False))
    return len(list(itertools.takewhile(bool, alike)))


class SlowShelf(KVConnectorBase_V1, SupportsHMA):
    """Keeps every finished context; knows at the second question; loads in a step."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.kept: list[list[int]] = []
        self.asked: set[str] = set()
        self.loading: set[str] = set()
        self.loaded_tokens = 0

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.request_id not in self.asked:
            self.asked.add(request.request_id)
            return None, False
        prompt = list(request.prompt_token_ids)
        best = max((common(prompt, kept) for kept in self.kept), default=0)
        best = min(best, len(prompt) - 1) // 16 * 16
        more = max(0, best - num_computed_tokens)
        return more, more > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self.loading.add(request.request_id)
            self.loaded_tokens += num_external_tokens

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request, block_ids):
        self.kept.append(list(request.all_token_ids)[:-1])
        return False, None

    def start_load_kv(self, *args, **kwargs): ...
    def wait_for_layer_load(self, *args): ...
    def save_kv_layer(self, *args, **kwargs): ...
    def wait_for_save(self): ...


class MultiEngine(Engine):
    """Reports the loads of the last step as done."""

    @property
    def shelf(self) -> SlowShelf:
        return self.scheduler.connector.sub_connectors[1]

    def execute(self, output: Any) -> KVConnectorOutput:
        done, self.shelf.loading = self.shelf.loading, set()
        return KVConnectorOutput(finished_recving=done or None)


@pytest.fixture
def engine(clock) -> MultiEngine:
    ours = {"kv_connector": "TTLConnector", "kv_connector_extra_config": HOLD_5S}
    other = {"kv_connector": "SlowShelf", "kv_connector_module_path": __name__}
    children = [{**child, "kv_role": "kv_both"} for child in (ours, other)]
    engine = MultiEngine(
        EngineSpec(kv_connector="MultiConnector", extra_config={"connectors": children})
    )
    engine.on_step = lambda: check(engine)
    return engine


PROMPT = list(range(1, 161))
HINTS = {"program_id": "p", "tool": "bash"}


def test_a_claimed_pin_is_not_loaded_from_the_other_connector(engine):
    context = engine.turn("a", PROMPT, hints=HINTS)
    engine.turn("b", [*context, 7], hints=HINTS | {"is_last_step": True})
    assert totals(engine)["pins:claimed"] == 1
    assert engine.shelf.loaded_tokens == 0
    assert free(engine) == 63


def test_an_expired_pin_is_loaded_from_it_while_others_run(engine, clock):
    context = engine.turn("a", PROMPT, hints=HINTS)
    clock.advance(5.1)
    engine.step()
    assert engine.scheduler.reset_prefix_cache()
    engine.add("other", range(500, 700), max_tokens=20, hints={"program_id": "q"})
    engine.turn("b", [*context, 7], hints=HINTS | {"is_last_step": True})
    assert totals(engine)["pins:expired"] == 1
    assert engine.shelf.loaded_tokens == 160
    # Another program's pin, or none, but never a block too many or too few.
    engine.role.teardown.release_all()
    assert free(engine) == 63
