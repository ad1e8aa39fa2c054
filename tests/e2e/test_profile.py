"""`ttlcache profile` with a real vLLM: what it writes, the connector reads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.serve.server import ServerOptions
from tests.documented import commands
from ttlcache.estimators.costs import CostModel

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 2100,
    "num_gpu_blocks_override": 80,
}


def test_the_documented_command(tiny_model, tmp_path):
    (command,) = (c for c in commands() if c.words[:2] == ["ttlcache", "profile"])
    words = [str(tiny_model) if w == "MODEL" else w for w in command.words[1:]]
    more = ["--budget", "20", "--max-tokens", "2000", "--engine", json.dumps(ENGINE)]
    done = subprocess.run(
        [sys.executable, "-m", "ttlcache.cli", *words, *more],
        cwd=tmp_path,
        env=ServerOptions(num_blocks=0).environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "unseen" in done.stdout
    assert "median error on unseen lengths" in done.stdout
    written = json.loads((tmp_path / "profile.json").read_text())
    costs = CostModel(written)
    assert 0 < costs.prefill_s(1000) < costs.prefill_s(2000)
