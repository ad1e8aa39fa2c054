"""Commands that cannot run say why, before anything starts."""

import shlex

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
        ("grid --half x", FAILED, "half 'x': expected one of"),
        ("grid --pools x", FAILED, "pool 'x': expected one of"),
        ("grid --workloads x", FAILED, "workload 'x': expected one of"),
        ("grid --loads ''", FAILED, "loads (): expected positive numbers"),
        ("grid --traces x --workloads weka_claude_code", FAILED, "with --traces"),
        ("harness wrk", USAGE, "expected one of agentic-bench, vllm-bench"),
        ("overhead", USAGE, "--core"),
        ("settings --with {}", USAGE, "at least twice"),
        ("settings --with {} --with {}", USAGE, "given twice"),
        ("settings --with {} --with {", USAGE, "not JSON"),
        ("settings --with {} --with lmcache:[]", USAGE, "must be a JSON object"),
        ("sim --arms nobody", FAILED, "arm 'nobody': expected one of"),
        ("sim --arms cachettl:{", FAILED, "after the colon neither JSON"),
        ("sim --arms cachettl:3", FAILED, "only connector arms take a JSON object"),
        ('sim --arms \'vllm:{"policy": "none"}\'', FAILED, "only connector arms"),
        ("sim --arms adaptive:no-such-idea", FAILED, "nor one of"),
        ("sim --arms cachettl:no-history", FAILED, "only policy adaptive has"),
        ("sim --arms vllm:no-history", FAILED, "only policy adaptive has"),
        ("sim --half odd", FAILED, "only traces have lines"),
        ("sim --half first --workload trace:x", FAILED, "half 'first': expected"),
        ("sim --hardware tpu", FAILED, "hardware 'tpu': expected one of"),
        ("sim --model gpt", FAILED, "model 'gpt': expected one of"),
        ("sim --offload tape:1", FAILED, "offload 'tape:1': expected"),
        ("transfer --pages-kib x", USAGE, "x"),
        ("validate --arms vllm,oracle", FAILED, "'oracle': only the simulator has it"),
        ("validate --arms infercept", FAILED, "only the simulator has it"),
        ("validate --arms thunderagent", FAILED, "only the simulator has it"),
        ("transfer --layouts XYZ", FAILED, "layout 'XYZ': expected one of"),
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
    assert told in output_of(app, *shlex.split(words), status=status)
