"""Structured calls, named tools, their classes and sub-agents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.labels import TOOL_CLASSES
from ttlcache.toolcalls import detect_items, is_subagent, key_for_tool
from ttlcache.toolcalls.classes import tool_class
from ttlcache.types import (
    APPROVAL_GAP,
    FINAL_GAP,
    KEY_PART_LIMIT,
    PARALLEL_TOOL,
    USER_GAP,
    GapKey,
)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], None),
        ([{"type": "message", "content": "hi"}], None),
        (
            [{"function": {"name": "bash", "arguments": '{"command": "make all"}'}}],
            GapKey("bash", "make"),
        ),
        (
            [
                {"type": "text", "text": "x"},
                {"type": "tool_use", "name": "Bash", "input": {"command": "npm test"}},
                {"type": "tool_use", "name": "Task", "input": {}},
            ],
            GapKey(PARALLEL_TOOL, "Task+npm"),
        ),
        (
            [{"type": "custom_tool_call", "name": "shell", "input": "make"}],
            GapKey("shell", "make"),
        ),
        ([{"type": "function_call", "name": None}, {"type": 7, "function": 3}], None),
    ],
)
def test_structured_items_give_this_key(items, expected):
    assert detect_items(items) == expected


UNKNOWN = GapKey("unknown_tool")
WORDS = st.sampled_from(
    ["type", "name", "function", "arguments", "tool_calls", "input"]
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4)
    ),
    max_leaves=10,
)


@given(
    st.lists(st.dictionaries(st.sampled_from(["type", "name", "content"]), JSON_VALUES))
)
def test_malformed_items_never_raise(items):
    detect_items(items)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("get_weather", None, GapKey("get_weather")),
        ("functions.search", {}, GapKey("search")),
        ("mcp__files__read", {}, GapKey("mcp__files__read")),
        (
            "mcp__desktop__execute_command",
            {"command": "make"},
            GapKey("mcp__desktop__execute_command", "make"),
        ),
        ("bash", {"command": "cd /x && pytest"}, GapKey("bash", "pytest")),
        ("bash", '{"command": "git fetch"}', GapKey("bash", "git")),
        ("bash", "git fetch", GapKey("bash", "git")),
        ("bash", None, GapKey("bash")),
        ("bash", {"restart": True}, GapKey("bash")),
        ("shell", {"cmd": ["cargo", "test"]}, GapKey("shell", "cargo")),
        ("terminal", {"commands": ["cd x", "make", "ls"]}, GapKey("terminal", "make")),
        ("Bash", {"command": 7}, GapKey("Bash")),
        ("git_tool", {"command": "push"}, GapKey("git_tool")),
        ("__parallel__", {}, GapKey("tool:__parallel__")),
    ],
)
def test_named_tool_gives_this_key(name, arguments, expected):
    assert key_for_tool(name, arguments) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["ask_user", "ask_followup_question", "request_human_approval"], APPROVAL_GAP),
        (["AskUserQuestion", "Ask human"], APPROVAL_GAP),
        (["finish", "submit", "attempt_completion", "final_answer"], FINAL_GAP),
        (["task_complete"], FINAL_GAP),
        (["Delegate work to coworker"], GapKey("delegateworktocoworker")),
        # What may be text of a conversation.
        (["the password is hunter2", "\u5bc6\u7801", "", "\x00"], UNKNOWN),
    ],
)
def test_a_name_alone_gives_this_key(names, expected):
    for name in names:
        for nothing in ({}, ""):
            assert key_for_tool(name, nothing) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (GapKey("Task"), True),
        (GapKey("Agent"), True),
        (GapKey("spawn_agent"), True),
        (GapKey("delegateworktocoworker"), True),
        (GapKey(PARALLEL_TOOL, "Task+ls"), True),
        (GapKey("bash", "task"), False),
        (GapKey(PARALLEL_TOOL, "ls+make"), False),
    ],
)
def test_subagents_are_told_apart(found, expected):
    assert is_subagent(found) is expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (FINAL_GAP, "final"),
        (USER_GAP, "user"),
        (APPROVAL_GAP, "approval"),
        (GapKey("unknown"), "unknown"),
        (GapKey.parallel((GapKey("a"), GapKey("b"))), "parallel"),
        (GapKey("Task"), "subagent"),
        (GapKey("bash"), "shell"),
        (GapKey("bash", "ls"), "shell-look"),
        (GapKey("bash", "pytest"), "shell-run"),
        (GapKey("bash", "deploy.sh"), "shell"),
        (GapKey("WebSearch"), "search"),
        (GapKey("fetch_url"), "fetch"),
        (GapKey("str_replace_editor"), "edit"),
        (GapKey("read_file"), "read"),
        (GapKey("calendar"), "other"),
    ],
)
def test_classes_of_tools(key, expected):
    assert tool_class(key) == expected


@given(st.text(), st.text())
def test_whatever_a_model_writes_the_labels_are_known(tool, executable):
    assert tool_class(GapKey(tool, executable)) in TOOL_CLASSES


def test_every_part_of_a_gap_key_is_bounded():
    key = GapKey("a" * 1000, "b" * 1000)
    assert len(str(key)) == 2 * KEY_PART_LIMIT + 1
    many = tuple(GapKey(f"tool-{n}") for n in range(1000))
    assert len(GapKey.parallel(many).executable) == KEY_PART_LIMIT


def test_parallel_calls_have_one_key_whatever_their_order():
    a, b = GapKey("search"), GapKey("bash", "pytest")
    assert GapKey.parallel((a, b)) == GapKey.parallel((b, a, a))
    assert str(GapKey.parallel((a, b))) == f"{PARALLEL_TOOL} pytest+search"
    assert GapKey.parallel((a,)) == a
