from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttlcache.toolcalls import key_for_tool
from ttlcache.toolcalls.classes import TOOL_CLASSES, tool_class
from ttlcache.types import APPROVAL_GAP, FINAL_GAP, USER_GAP, GapKey


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (FINAL_GAP, "final"),
        (USER_GAP, "user"),
        (APPROVAL_GAP, "approval"),
        (GapKey("unknown"), "unknown"),
        (GapKey.parallel((GapKey("a"), GapKey("b"))), "parallel"),
        (key_for_tool("Task"), "subagent"),
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
def test_classes(key, expected):
    assert tool_class(key) == expected


@given(st.text(), st.text())
def test_whatever_a_model_writes_the_labels_are_known(tool, executable):
    assert tool_class(GapKey(tool, executable)) in TOOL_CLASSES
