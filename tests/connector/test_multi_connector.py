"""`MultiConnector [TTLConnector, another one]`: pins above anybody's lower tier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

from bench.sim.harness import EngineSpec
from tests.connector.conftest import HOLD_5S, Engine, check, free, totals

BLOCK = 16


class Metadata(KVConnectorMetadata):
    pass


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
        best = max((_common(prompt, kept) for kept in self.kept), default=0)
        best = min(best, len(prompt) - 1) // BLOCK * BLOCK
        more = max(0, best - num_computed_tokens)
        return more, more > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self.loading.add(request.request_id)
            self.loaded_tokens += num_external_tokens

    def build_connector_meta(self, scheduler_output):
        return Metadata()

    def request_finished_all_groups(self, request, block_ids):
        self.kept.append(list(request.all_token_ids)[:-1])
        return False, None

    def start_load_kv(self, *args, **kwargs): ...
    def wait_for_layer_load(self, *args): ...
    def save_kv_layer(self, *args, **kwargs): ...
    def wait_for_save(self): ...


def _common(a: list[int], b: list[int]) -> int:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


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
    children = [
        {
            "kv_connector": "TTLConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": dict(HOLD_5S),
        },
        {
            "kv_connector": "SlowShelf",
            "kv_connector_module_path": __name__,
            "kv_role": "kv_both",
        },
    ]
    spec = replace(
        EngineSpec(),
        kv_connector="MultiConnector",
        extra_config={"connectors": children},
    )
    engine = MultiEngine(spec)
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
    engine.role.upkeep.release_all()
    assert free(engine) == 63


def test_the_answer_not_yet_changes_nothing(engine):
    engine.add("a", PROMPT, hints=HINTS)
    engine.step()
    assert "a" in engine.shelf.asked
    engine.run()
    assert totals(engine)["pins_started"] == 1
    assert totals(engine)["turns_identified:hint"] == 1
