"""From output tokens to the tool that comes next."""

from __future__ import annotations

import time

import pytest
from vllm.config import ModelConfig
from vllm.tool_parsers import ToolParserManager

from bench.serve.tiny_model import build
from ttlcache.types import GapKey
from ttlcache_connector.engine.tool_reader import OutputReader, VLLMParser
from ttlcache_connector.plugin import _name_tool_parser


@pytest.fixture(scope="module")
def model_config(tmp_path_factory):
    return ModelConfig(model=str(build(tmp_path_factory.mktemp("model") / "tiny")))


def ready(reader: OutputReader) -> OutputReader:
    deadline = time.monotonic() + 300
    while not reader.ready and time.monotonic() < deadline:
        time.sleep(0.05)
    assert reader.ready
    return reader


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Let me test.\n```bash\ncd src && timeout 60 pytest -q\n```",
            GapKey("bash", "pytest"),
        ),
        (
            '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>',
            GapKey("get_weather"),
        ),
        ("All done, good bye.", None),
    ],
)
def test_reads_tokens_of_a_real_tokenizer(model_config, text, expected):
    reader = ready(OutputReader(model_config, tail_tokens=512))
    ids = reader._tokenizer.encode(text, add_special_tokens=False)
    assert reader.read(ids) == expected


def test_only_the_tail_is_read(model_config):
    reader = ready(OutputReader(model_config, tail_tokens=64))
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = reader._tokenizer.encode(call + "and so on " * 200, add_special_tokens=False)
    assert reader.read(ids) is None


def test_vllms_parser_reads_what_ours_do_not(model_config):
    tokenizer = ready(OutputReader(model_config, tail_tokens=64))._tokenizer
    read = VLLMParser("internlm", tokenizer).read
    text = (
        "I look it up.<|action_start|><|plugin|>\n"
        '{"name": "search", "parameters": {"q": "x"}}<|action_end|>\n'
    )
    assert read(text) == GapKey("search")
    assert read("no call at all") is None
    assert read("an example:\n```bash\nls\n```") is None


def test_an_unknown_parser_leaves_ours(model_config, our_log):
    reader = ready(OutputReader(model_config, "no-such-parser", 512))
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = reader._tokenizer.encode(text, add_special_tokens=False)
    deadline = time.monotonic() + 300
    while not our_log and time.monotonic() < deadline:
        time.sleep(0.05)
    assert reader.read(ids) == GapKey("f")
    assert any("no-such-parser" in line for line in our_log)


def test_no_parser_of_vllms_can_raise_into_the_engine(model_config, our_log):
    tokenizer = ready(OutputReader(model_config, tail_tokens=64))._tokenizer
    names = ToolParserManager.list_registered()
    assert len(names) > 20
    for name in names:
        parser = VLLMParser(name, tokenizer)
        for text in ("plain words", "<tool_call>{broken", "x" * 3000):
            parser.read(text)
    # gpt-oss's parser is a stub that always raises: dropped, not counted as a fault.
    assert any("'openai'" in line for line in our_log)


def test_a_slow_parser_is_used_once(model_config, our_log, monkeypatch):
    tokenizer = ready(OutputReader(model_config, tail_tokens=64))._tokenizer
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
    extra: dict[str, str] = {}
    _name_tool_parser(extra, argv)
    assert extra.get("tool_call_parser") == expected
    mine = {"tool_call_parser": "mine"}
    _name_tool_parser(mine, argv)
    assert mine["tool_call_parser"] == "mine"


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
        extra: dict[str, str] = {}
        _name_tool_parser(extra, argv)
        assert extra.get("tool_call_parser") == expected
