"""Turns that end on a stop string: the engine sees an abort, the program goes on.

vLLM looks for stop strings where it detokenises, in the API server, and aborts the
request in the engine. Here its own output processor does so, on a real tokenizer.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor

from bench.serve.tiny_model import build
from bench.sim import harness
from tests.connector.conftest import pinned, totals
from ttlcache_connector.engine.tool_reader import OutputReader

STOP = "</function"
CALL = f"I look.\n<function=bash>\n<parameter=command>ls -l</parameter>\n{STOP}"
REST = ">\n and whatever a model says until somebody stops it" * 8


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = build(tmp_path_factory.mktemp("model") / "tiny")
    reader = OutputReader(ModelConfig(model=str(folder)), tail_tokens=512)
    deadline = time.monotonic() + 300
    while not reader.ready and time.monotonic() < deadline:
        time.sleep(0.05)
    assert reader.ready
    return reader


class Frontend:
    """What vLLM's API server does with outputs; its aborts come some steps late."""

    def __init__(self, engine: Any, tokenizer: Any, late_steps: int) -> None:
        self.engine = engine
        self.outputs = OutputProcessor(tokenizer, log_stats=False)
        self.late_steps = late_steps
        self._to_abort: list[tuple[int, str]] = []
        self._update = engine.scheduler.update_from_output
        engine.scheduler.update_from_output = self._updated

    def send(self, request_id: str, prompt: list[int], program: str, **sampling: Any):
        hints = {"program_id": program}
        request = self.engine.add(request_id, prompt, max_tokens=200, hints=hints)
        params = request.sampling_params
        params.min_tokens = 0
        for name, value in sampling.items():
            setattr(params, name, value)
        request_args = (request_id, prompt, None, params, None, 0.0, None, None, None)
        sent = EngineCoreRequest(*request_args, external_req_id=request_id)
        self.outputs.add_request(sent, None)
        return request

    def run(self) -> None:
        while self.engine.scheduler.has_unfinished_requests():
            self.engine.step()
            due = [rid for left, rid in self._to_abort if left <= 0]
            self._to_abort = [(n - 1, rid) for n, rid in self._to_abort if n > 0]
            for request_id in due:
                self.engine.abort(request_id)
        self.engine.drain()

    def _updated(self, *args: Any) -> Any:
        told = self._update(*args)
        for of_client in told.values():
            done = self.outputs.process_outputs(of_client.outputs)
            self._to_abort += [(self.late_steps, rid) for rid in done.reqs_to_abort]
        return told


@pytest.fixture
def frontend(make_engine, async_scheduling, reader, monkeypatch):
    engine = make_engine(num_blocks=64, async_scheduling=async_scheduling)
    engine.role.requests._reader = reader
    tokenizer = reader._tokenizer
    script = tokenizer.encode(CALL + REST, add_special_tokens=False)

    def next_tokens(request: Any, count: int) -> list[int]:
        said = request.num_output_tokens
        return script[said : said + count]

    monkeypatch.setattr(harness, "next_tokens", next_tokens)
    return Frontend(engine, tokenizer, late_steps=2)


PROMPT = list(range(300, 364))


def test_a_turn_that_ends_on_a_stop_string_is_retained(frontend):
    engine = frontend.engine
    request = frontend.send("a-1", PROMPT, "A", stop=[STOP])
    frontend.run()
    assert request.status.name == "FINISHED_ABORTED"
    assert pinned(engine) > 0
    [program] = engine.controller.programs
    assert program.turns_finished == 1
    assert str(program.open_turns[-1].gap_key) == "bash ls"
    # The client repeats what it got: all up to the stop string.
    said = engine.role.requests._reader._tokenizer.encode(
        CALL.removesuffix(STOP), add_special_tokens=False
    )
    frontend.send("a-2", [*PROMPT, *said, *range(400, 420)], "A", stop=[STOP])
    frontend.run()
    assert totals(engine)["pins:claimed"] == 1
    assert totals(engine)["claimed_tokens"] >= len(PROMPT)


def test_a_client_that_goes_away_leaves_no_pin(frontend):
    engine = frontend.engine
    frontend.send("a-1", PROMPT, "A", stop=["never said"])
    for _ in range(20):
        engine.step()
    engine.abort("a-1")
    engine.drain()
    assert pinned(engine) == 0
    [program] = engine.controller.programs
    assert program.turns_finished == 0


def test_a_stop_string_in_the_middle_of_an_output_did_not_end_it(frontend):
    """`min_tokens` had vLLM pass over it; the client left much later."""
    engine = frontend.engine
    frontend.send("a-1", PROMPT, "A", stop=[STOP], min_tokens=199)
    for _ in range(170):
        engine.step()
    engine.abort("a-1")
    engine.drain()
    assert pinned(engine) == 0


@pytest.mark.parametrize("stop", [["\ud800", STOP], ["", STOP], ["x" * 100_000, STOP]])
def test_odd_stop_strings_do_no_harm(reader, stop):
    ids = reader._tokenizer.encode(CALL, add_special_tokens=False)
    params = SamplingParams()
    params.stop = stop
    assert reader.holds_stop(ids, params)
    params.stop = ["z" * 9] * 10_000
    assert not reader.holds_stop(ids, params)
    assert not reader.holds_stop([], params)
