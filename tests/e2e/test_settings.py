"""`bench settings` on real servers: both arms run, and the outputs are the same."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from bench.cli import app

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

NO_ROOM = '{"admission": "none"}'


def test_two_settings_on_the_same_programs(tmp_path, tiny_model):
    result = CliRunner().invoke(
        app,
        [
            *("settings", "--with", "vanilla", "--with", NO_ROOM),
            *("--programs", "2", "--rounds", "1", "--token-scale", "0.02"),
            *("--out", str(tmp_path), "--model", str(tiny_model)),
        ],
    )
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "result.json").read_text())
    (round_,) = told["rounds"]
    assert told["problems"] == []
    assert list(round_) == ["vanilla", NO_ROOM]
    plain, ours = round_.values()
    assert plain["num_turns"] == ours["num_turns"] > 0
    assert plain["pins"] == {}
    assert ours["pins"]["claimed"] > 0
    log = (tmp_path / "round-0" / "server-1.log").read_text()
    assert "admission=none" in log


def test_connectors_above_lmcache_servers_of_their_own(tmp_path, tiny_model):
    pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")
    below = '{"lower_tier": "lmcache", "policy": "none"}'
    result = CliRunner().invoke(
        app,
        [
            *("settings", "--with", "lmcache", "--with", below, "--no-hints"),
            *("--programs", "4", "--at-once", "3", "--rounds", "1"),
            *("--blocks", "97", "--token-scale", "0.02", "--chunk-tokens", "32"),
            *("--cpu-gb", "0.25", "--out", str(tmp_path), "--model", str(tiny_model)),
        ],
    )
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "result.json").read_text())
    (round_,) = told["rounds"]
    assert told["problems"] == []
    assert list(round_) == ["lmcache", below]
    plain, ours = round_.values()
    assert plain["num_turns"] == ours["num_turns"] > 0
    assert plain["pins"] == {}
    for arm in (plain, ours):
        assert arm["lower_tier_hits"] > 0  # both reload from their servers
    assert ours["tier_bytes"]["promoted"] > 0
    logs = tmp_path / "round-0"
    assert (logs / "server-0.lmcache.log").exists()
    assert (logs / "server-1.lmcache.log").exists()
