"""Commands that cannot run say why, before anything starts."""

from __future__ import annotations

import pytest
import torch

from bench.cli import app
from tests.commands import output_of

#: A usage error, and what a command finds out when it begins.
USAGE, FAILED = 2, 1


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("demo --connector-config {", USAGE, "is not JSON"),
        ("demo --connector-config [1]", USAGE, "must be a JSON object"),
        ("demo --trace no-such-file.gz", FAILED, "no such file"),
        ("demo --rate 0", FAILED, "must be positive"),
        ("demo --blocks 32", FAILED, "raise --blocks or lower --token-scale"),
        ("fleet --arms session,nobody", USAGE, "nobody"),
        ("fleet --arms ,", USAGE, "arms"),
        ("fleet --connector-config []", USAGE, "must be a JSON object"),
        ("gaps no-such-file.gz", FAILED, "no such file"),
        ("grid --pools huge", FAILED, "expected one of"),
        ("harness wrk", USAGE, "expected one of agentic-bench, vllm-bench"),
        ("overhead", USAGE, "--core"),
        ("settings --with {}", USAGE, "at least twice"),
        ("sim --arms nobody", FAILED, "expected one of"),
        ("transfer --pages-kib x", USAGE, "x"),
        ("transfer --layouts XYZ", USAGE, "XYZ"),
        ("transfer --device tpu", USAGE, "tpu"),
        pytest.param(
            "transfer --device cuda",
            FAILED,
            "not run: no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_what_cannot_run_is_refused_with_its_reason(words, status, told):
    command, *options = words.split()
    assert told in output_of(app, command, *options, status=status)
