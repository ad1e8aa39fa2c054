"""docs/vllm-options.md: each row has a verdict, and the tests that it cites exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "vllm-options.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| option |")
]
VERDICTS = ("works", "refused")
#: What touches connector, scheduler class, middleware, prefix cache or KV events.
ASKED_FOR = (
    *("--kv-offloading-size", "--kv-offloading-backend", "VLLM_USE_SIMPLE_KV_OFFLOAD"),
    *("--scheduler-cls", "--async-scheduling", "--scheduling-policy"),
    *("--api-server-count", "--headless", "VLLM_USE_RUST_FRONTEND", "--grpc"),
    *("--speculative-config", "kv_role", "kv_load_failure_policy", "MultiConnector"),
    *("--data-parallel-size", "--pipeline-parallel-size", "--tensor-parallel-size"),
    *("--enable-lora", "--enable-sleep-mode", "--weight-transfer-config"),
    *("--kv-events-config", "--prefix-caching-hash-algo", "--kv-cache-dtype"),
    *("--no-enable-prefix-caching", "--no-enable-chunked-prefill"),
    *("--disable-hybrid-kv-cache-manager", "--disable-log-stats", "--middleware"),
    *("multimodal models", "models for embeddings", "encoder-decoder models"),
    *("VLLM_PLUGINS", "VLLM_SERVER_DEV_MODE", "VLLM_ENABLE_V1_MULTIPROCESSING"),
    *("PYTORCH_CUDA_ALLOC_CONF", "VLLM_LOGGING_LEVEL", "VLLM_API_KEY"),
)


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_each_row_has_a_verdict_and_a_test_or_says_that_it_has_none(row):
    assert len(row) == 3
    option, verdict, tested_by = row
    assert option
    assert verdict.startswith(VERDICTS)
    assert ("works without" in verdict) == ("said at start" in verdict)
    if tested_by == "untested":
        return
    cited = [
        re.fullmatch(r"`(tests/[\w/]+\.py)::(\w+)`", c) for c in tested_by.split(", ")
    ]
    assert all(cited), tested_by
    for test in cited:
        assert test[2] in functions_of(test[1]), tested_by


@pytest.mark.parametrize("option", ASKED_FOR)
def test_no_option_is_left_out(option):
    assert any(option in row[0] for row in ROWS)


def test_no_option_has_two_verdicts():
    options = [row[0] for row in ROWS]
    assert len(ROWS) > 50
    assert len(set(options)) == len(options)
