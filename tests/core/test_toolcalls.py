"""Outputs as agents and models write them, and the gap key of each.

`toolcalls/` has one file a format: raw outputs, each under a line that names the case
and the words of its key (`none`: no call).
"""

import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttlcache.toolcalls import detect, shell_key
from ttlcache.types import APPROVAL_GAP, FINAL_GAP, PARALLEL_TOOL, GapKey

# DeepSeek's markers: full-width bars and U+2581.
BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
SEP = "<\uff5ctool\u2581sep\uff5c>"


def fence(body):
    return f"THOUGHT: let me look.\n\n```bash\n{body}\n```\n"


def rows_of(path):
    """The cases of one file."""
    rows = []
    for block in re.split(r"^=== ", path.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        head, _, body = block.partition("\n")
        case, _, words = head.partition(" -> ")
        key = None if words == "none" else GapKey(*words.split())
        rows.append((case, body.removesuffix("\n"), key))
    return rows


FILES = sorted((Path(__file__).parent / "toolcalls").glob("*.txt"))
FORMATS = {path.stem: rows_of(path) for path in FILES}
#: What no file shows: too long, or bytes that editors change.
MADE = [
    ("crlf", "```bash\r\ncd x\r\npytest\r\n```\r\n", GapKey("bash", "pytest")),
    ("depth-bomb", '{"a":' * 5000, None),
    (
        "long-argument",
        '<tool_call>{"name": "write_file", "arguments": {"text": "'
        + "x" * 99_999
        + '"}}</tool_call>',
        GapKey("write_file"),
    ),
    ("call-at-the-end", "x\n" * 50_000 + fence("make"), GapKey("bash", "make")),
    (
        "very-long-thought",
        f"<think>{fence('ls')}{'x' * 60_000}</think>{'y' * 40_000}{fence('make')}",
        GapKey("bash", "make"),
    ),
    ("call-in-the-middle", "x\n" * 30_000 + fence("ls") + "x\n" * 30_000, None),
]
ROWS = [
    pytest.param(text, expected, id=f"{name}-{case}")
    for name, rows in {**FORMATS, "made": MADE}.items()
    for case, text, expected in rows
]
SHORT_CALLS = [
    text
    for name, rows in {**FORMATS, "made": MADE[:1]}.items()
    for _, text, expected in rows
    if name != "special" and expected is not None and len(text) < 400
]


@pytest.mark.parametrize(("text", "expected"), ROWS)
def test_output_text_gives_this_key(text, expected):
    assert detect(text) == expected


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", '{"name": "', '"arguments": {', "}", "[", "]",
        "(", ")", '"', "'", "\\", "```bash\n", "```\n", "<function=f>", "f(x=",
        "<parameter=command>", "</parameter>", "</function>", "[TOOL_CALLS]", "bash",
        "to=functions.f ", "<|message|>", BEGIN, SEP, "<<EOF\n",
        "EOF\n", "$(", "`", "&&", "|", "; ", "\n", " -c ", "sudo ", "timeout ", "x",
        '<invoke name="f">', '<parameter name="command">', "<think>", "</think>",
        '"commands": [{"keystrokes": "', "python -m ", "#", "\x00", "\ud800",
    ]
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(FRAGMENTS | st.text(max_size=40), max_size=60).map("".join))
def test_shuffled_fragments_give_clean_keys_or_none(text):
    for key in (detect(text), shell_key(text)):
        parts = () if key is None else key
        assert all(part.isprintable() and " " not in part for part in parts)
        assert key is None or key.tool


# Names that formats imply, or that stand for others.
IMPLIED = {"", "bash", "shell", "terminal", "python"}


@pytest.mark.parametrize("text", SHORT_CALLS)
def test_truncation_never_invents_a_name(text):
    """Wherever a call is cut off, half a name is no name."""
    for end in range(len(text)):
        cut = detect(text[:end])
        if cut is None or cut in (FINAL_GAP, APPROVAL_GAP):
            continue
        tools = () if cut.tool == PARALLEL_TOOL else (cut.tool,)
        for name in {*tools, *cut.executable.split("+")} - IMPLIED:
            assert re.search(re.escape(name) + r"(?![\w-])", text), text[:end]


@pytest.mark.parametrize(
    "unit",
    [
        "(", "[", "{", '{"', "{'", '{"a":', '{"name":', '[{"name": "f", "arguments":',
        "```bash\n", "```", "`", "<tool_call>", '<tool_call>{"', "<tool_call>[",
        "<tool_call>a<arg_key>", "<TOOLCALL>a<arg_key>", "1.",
        "<function=f>", "<parameter=x>", "<function=f><parameter=x>", "<function=",
        '<invoke name="f">', '<invoke name="f"><parameter name="x">', "<invoke",
        "[TOOL_CALLS]", "[TOOL_CALLS]f{", "to=functions.f ", " to=f <|",
        BEGIN, BEGIN + "f" + SEP + "{",
        '"', "'", "\\", '\\"', " ", "\n", "\t{", "a", "a ", "\u00e9", "<think>",
        "</think>", '{"commands":[', "<arg_key>a</arg_key><arg_value>", "<|", "$(",
        "${", "<<E ", "<<E\n", "cd x && ", "a=b ", "sudo ", "bash -c '", "bash -c ",
        '"\\', "$'", "|", "&", "#", "0", "0<", "a.", "-m ", "~~~\n", "{ ", '{\n"',
    ],
)  # fmt: skip
def test_no_input_takes_long(unit):
    text = unit * (100_000 // len(unit)) + "x"
    openings = ("", "```bash\n", "<tool_call>", '{"name": "bash", "arguments": {"c": "')
    for opening in openings:
        start = time.process_time()
        detect(opening + text)
        shell_key(opening + text)
        assert time.process_time() - start < 0.5  # mostly 0.02
