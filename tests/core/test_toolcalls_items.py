"""Structured calls, named tools and sub-agents."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttlcache.toolcalls import detect_items, is_subagent, key_for_tool
from ttlcache.types import APPROVAL_GAP, FINAL_GAP, PARALLEL_TOOL, GapKey


def key(*parts: str) -> GapKey:
    return GapKey(*parts)


def both(*tools: str) -> GapKey:
    return GapKey(PARALLEL_TOOL, "+".join(tools))


ITEMS = [
    pytest.param([], None, id="nothing"),
    pytest.param([{"type": "message", "content": "hi"}], None, id="text"),
    pytest.param(
        [{"type": "reasoning"}, {"type": "function_call", "name": "f"}],
        key("f"),
        id="function-call",
    ),
    pytest.param(
        [{"function": {"name": "bash", "arguments": '{"command": "make all"}'}}],
        key("bash", "make"),
        id="tool-call",
    ),
    pytest.param(
        [
            {"type": "text", "text": "x"},
            {"type": "tool_use", "name": "Bash", "input": {"command": "npm test"}},
            {"type": "tool_use", "name": "Task", "input": {}},
        ],
        both("Task", "npm"),
        id="tool-use",
    ),
    pytest.param(
        [{"type": "local_shell_call", "action": {"command": ["pytest", "-q"]}}],
        key("shell", "pytest"),
        id="local-shell",
    ),
    pytest.param(
        [{"type": "custom_tool_call", "name": "shell", "input": "make"}],
        key("shell", "make"),
        id="custom-tool",
    ),
    pytest.param(
        [{"type": "function_call", "name": None}, {"type": 7, "function": 3}],
        None,
        id="malformed",
    ),
]


@pytest.mark.parametrize(("items", "expected"), ITEMS)
def test_structured_items_give_this_key(
    items: list[dict[str, object]], expected: GapKey | None
) -> None:
    assert detect_items(items) == expected


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["type", "name", "function", "arguments", "tool_calls", "input"]
            ),
            inner,
            max_size=4,
        )
    ),
)


@given(
    st.lists(st.dictionaries(st.sampled_from(["type", "name", "content"]), JSON_VALUES))
)
def test_malformed_items_never_raise(items: list[dict[str, object]]) -> None:
    detect_items(items)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("get_weather", None, key("get_weather")),
        ("functions.search", {}, key("search")),
        ("mcp__files__read", {}, key("mcp__files__read")),
        (
            "mcp__desktop__execute_command",
            {"command": "make"},
            key("mcp__desktop__execute_command", "make"),
        ),
        ("bash", {"command": "cd /x && pytest"}, key("bash", "pytest")),
        ("bash", '{"command": "git fetch"}', key("bash", "git")),
        ("bash", "git fetch", key("bash", "git")),
        ("bash", None, key("bash")),
        ("bash", {"restart": True}, key("bash")),
        ("shell", {"cmd": ["cargo", "test"]}, key("shell", "cargo")),
        ("terminal", {"commands": ["cd x", "make", "ls"]}, key("terminal", "make")),
        ("Bash", {"command": 7}, key("Bash")),
        ("git_tool", {"command": "push"}, key("git_tool")),
        ("ask_user", {}, APPROVAL_GAP),
        ("ask_followup_question", {}, APPROVAL_GAP),
        ("request_human_approval", {}, APPROVAL_GAP),
        ("AskUserQuestion", {}, APPROVAL_GAP),
        ("finish", {}, FINAL_GAP),
        ("submit", "", FINAL_GAP),
        ("attempt_completion", {}, FINAL_GAP),
        ("final_answer", {}, FINAL_GAP),
        ("task_complete", {}, FINAL_GAP),
        ("Delegate work to coworker", {}, key("delegateworktocoworker")),
        ("Ask human", {}, APPROVAL_GAP),
        ("the password is hunter2", {}, key("unknown_tool")),
        ("\u5bc6\u7801", {}, key("unknown_tool")),
        ("", {}, key("unknown_tool")),
        ("\x00", {}, key("unknown_tool")),
        ("__parallel__", {}, key("tool:__parallel__")),
    ],
)
def test_named_tool_gives_this_key(
    name: str, arguments: dict[str, object] | str | None, expected: GapKey
) -> None:
    assert key_for_tool(name, arguments) == expected


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
def test_subagents_are_told_apart(found: GapKey, expected: bool) -> None:
    assert is_subagent(found) is expected
