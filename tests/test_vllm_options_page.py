"""docs/vllm-options.md: each row has a verdict, and the tests that it cites exist."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.documented import ROOT

PAGE = (ROOT / "docs" / "vllm-options.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| option |")
]


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, functions)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_each_row_has_a_verdict_and_a_test_or_says_that_it_has_none(row):
    assert len(row) == 3
    option, verdict, tested_by = row
    assert option
    assert verdict.startswith(("works", "refused"))
    assert ("works without" in verdict) == ("said at start" in verdict)
    if tested_by == "untested":
        return
    for each in tested_by.split(", "):
        cited = re.fullmatch(r"`(tests/[\w/]+\.py)::(\w+)`", each)
        assert cited, tested_by
        assert cited[2] in functions_of(cited[1]), tested_by


def test_no_option_has_two_verdicts():
    options = [row[0] for row in ROWS]
    assert len(ROWS) > 50
    assert len(set(options)) == len(options)
