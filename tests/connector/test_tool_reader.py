"""From output tokens to the tool that comes next; turns that end on a stop string."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor

from bench.serve.tiny_model import build
from tests.connector.conftest import pinned, totals
from tests.waiting import becomes
from ttlcache.types import GapKey
from ttlcache_connector.engine.tool_reader import OutputReader, VLLMParser
from ttlcache_connector.plugin import _name_tool_parser
from ttlcache_sim import harness

PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def model_config(tmp_path_factory):
    return ModelConfig(model=str(build(tmp_path_factory.mktemp("model") / "tiny")))


@pytest.fixture
def make_reader(model_config):
    def make(parser=None, tail_tokens=512):
        reader = OutputReader(model_config, parser, tail_tokens)
        assert becomes(lambda: reader.ready, PATIENCE_S)
        return reader

    return make


@pytest.fixture
def reader(make_reader):
    return make_reader()


def encode(reader, text):
    return reader._tokenizer.encode(text, add_special_tokens=False)


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "tail_tokens", "expected"),
    [
        (
            "Let me test.\n```bash\ncd src && timeout 60 pytest -q\n```",
            512,
            GapKey("bash", "pytest"),
        ),
        (CALL, 512, GapKey("f")),
        (CALL + "and so on " * 200, 64, None),  # only the tail is read
        ("All done, good bye.", 512, None),
    ],
)
def test_reads_tokens_of_a_real_tokenizer(make_reader, text, tail_tokens, expected):
    reader = make_reader(tail_tokens=tail_tokens)
    assert reader.read(encode(reader, text)) == expected


@pytest.fixture
def tokenizer(reader):
    return reader._tokenizer


def test_vllms_parser_reads_what_ours_do_not(tokenizer):
    read = VLLMParser("internlm", tokenizer).read
    text = (
        "I look it up.<|action_start|><|plugin|>\n"
        '{"name": "search", "parameters": {"q": "x"}}<|action_end|>\n'
    )
    assert read(text) == GapKey("search")
    assert read("no call at all") is None
    assert read("an example:\n```bash\nls\n```") is None


def test_an_unknown_parser_leaves_ours(make_reader, our_log):
    reader = make_reader("no-such-parser")
    assert becomes(lambda: our_log, PATIENCE_S)
    assert reader.read(encode(reader, CALL)) == GapKey("f")
    assert any("no-such-parser" in line for line in our_log)


def test_no_parser_of_vllms_can_raise_into_the_engine(tokenizer, our_log):
    names = ToolParserManager.list_registered()
    assert len(names) > 20
    for name in names:
        parser = VLLMParser(name, tokenizer)
        for text in ("plain words", "<tool_call>{broken", "x" * 3000):
            parser.read(text)
    # gpt-oss's parser is a stub that always raises: dropped, not counted as a fault.
    assert any("'openai'" in line for line in our_log)


def test_a_slow_parser_is_used_once(tokenizer, our_log, monkeypatch):
    parser = VLLMParser("hermes", tokenizer)
    monkeypatch.setattr(VLLMParser, "SLOW_S", -1.0)
    parser.read("plain words")
    assert any("took more than" in line for line in our_log)
    assert parser._parser_cls is None


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--tool-call-parser", "hermes"], "hermes"),
        (["--tool-call-parser=hermes", "--port", "1"], "hermes"),
        (["--tool-call-parser"], None),
        ([], None),
    ],
)
def test_the_servers_parser_is_handed_on(argv, expected):
    assert named({}, argv) == expected
    assert named({"tool_call_parser": "mine"}, argv) == "mine"


def named(extra: dict[str, str], argv: list[str]) -> str | None:
    _name_tool_parser(extra, argv)
    return extra.get("tool_call_parser")


def test_a_parser_named_in_vllms_config_file_is_found_too(tmp_path):
    (file := tmp_path / "serve.yaml").write_text("tool-call-parser: hermes\n")
    (mine := tmp_path / "mine.json").write_text("{}")
    for argv, expected in (
        (["serve", "--config", str(file)], "hermes"),
        (["serve", f"--config={file}", "--tool-call-parser", "xlam"], "xlam"),
        (["script.py", "--config", str(mine)], None),
        (["script.py", "--config", "absent.yaml"], None),
        (["script.py", "--config"], None),
    ):
        assert named({}, argv) == expected


# --- turns that end on a stop string: the engine sees an abort, the program goes on


STOP = "</function"
SAID = f"I look.\n<function=bash>\n<parameter=command>ls -l</parameter>\n{STOP}"
REST = ">\n and whatever a model says until somebody stops it" * 8


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
    script = encode(reader, SAID + REST)

    def next_tokens(request: Any, count: int) -> list[int]:
        said = request.num_output_tokens
        return script[said : said + count]

    monkeypatch.setattr(harness, "next_tokens", next_tokens)
    return Frontend(engine, reader._tokenizer, late_steps=2)


PROMPT = list(range(300, 364))


def test_a_turn_that_ends_on_a_stop_string_is_retained(frontend, reader):
    engine = frontend.engine
    request = frontend.send("a-1", PROMPT, "A", stop=[STOP])
    frontend.run()
    assert request.status.name == "FINISHED_ABORTED"
    assert pinned(engine) > 0
    [program] = engine.controller.programs
    assert program.turns_finished == 1
    assert str(program.awaited_turns[-1].gap_key) == "bash ls"
    # The client repeats what it got: all up to the stop string.
    said = encode(reader, SAID.removesuffix(STOP))
    frontend.send("a-2", [*PROMPT, *said, *range(400, 420)], "A", stop=[STOP])
    frontend.run()
    assert totals(engine)["pins:claimed"] == 1
    assert totals(engine)["claimed_tokens"] >= len(PROMPT)


@pytest.mark.parametrize(
    ("sampling", "steps"),
    [
        ({"stop": ["never said"]}, 20),
        # `min_tokens` has vLLM pass over it: it did not end the output.
        ({"stop": [STOP], "min_tokens": 199}, 170),
    ],
)
def test_a_client_that_goes_away_leaves_no_pin(frontend, sampling, steps):
    engine = frontend.engine
    frontend.send("a-1", PROMPT, "A", **sampling)
    for _ in range(steps):
        engine.step()
    engine.abort("a-1")
    engine.drain()
    assert pinned(engine) == 0
    [program] = engine.controller.programs
    assert program.turns_finished == 0


@pytest.mark.parametrize("stop", [["\ud800", STOP], ["", STOP], ["x" * 100_000, STOP]])
def test_odd_stop_strings_do_no_harm(reader, stop):
    ids, params = encode(reader, SAID), SamplingParams()
    params.stop = stop
    assert reader.holds_stop(ids, params)
    params.stop = ["z" * 9] * 10_000
    assert not reader.holds_stop(ids, params)
    assert not reader.holds_stop([], params)
