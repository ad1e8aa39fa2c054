"""The real tensors of vLLM's CPU worker: out to chunks and back, same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
SCRIPT = Path(__file__).with_name("kv_round_trip.py")


def test_blocks_survive_the_way_out_and_back(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["layout"] == "LBHNC"
    assert report["exact"]
    tokens, cached = report["stayed"]
    assert cached >= 512
    assert report["returned"] == [tokens, cached]
    # The same cache hit on destroyed blocks says something else: KV matters here.
    assert report["zeroed"][1] == cached
    assert report["zeroed"][0] != tokens
