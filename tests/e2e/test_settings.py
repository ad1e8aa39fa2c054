"""`bench settings` on real servers: every kind of arm runs on the same programs."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from bench.cli import app

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_connectors_above_lmcache_servers_of_their_own(tmp_path, tiny_model):
    pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")
    below = '{"lower_tier": "lmcache", "policy": "none"}'
    result = CliRunner().invoke(
        app,
        [
            *("settings", "--with", "vanilla", "--with", "lmcache", "--with", below),
            *("--no-hints", "--programs", "4", "--at-once", "3", "--rounds", "1"),
            *("--blocks", "97", "--token-scale", "0.02", "--chunk-tokens", "32"),
            *("--cpu-gb", "0.25", "--out", str(tmp_path), "--model", str(tiny_model)),
        ],
    )
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "result.json").read_text())
    (round_,) = told["rounds"]
    assert told["problems"] == []
    assert list(round_) == ["vanilla", "lmcache", below]
    vanilla, lmcache, ours = round_.values()
    for arm in (vanilla, lmcache):
        assert arm["num_turns"] == ours["num_turns"] > 0
        assert arm["pins"] == {}
    for arm in (lmcache, ours):
        assert arm["lower_tier_hits"] > 0  # both reload from their servers
    assert ours["tier_bytes"]["promoted"] > 0
    logs = tmp_path / "round-0"
    assert (logs / "server-1.lmcache.log").exists()
    assert (logs / "server-2.lmcache.log").exists()
