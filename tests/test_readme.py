"""What README, and the tables that it links to, say is what the code does."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.serve import process
from ttlcache import load_config
from ttlcache.estimators.costs import CostModel
from ttlcache.programs.hints import parse_hints

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
BENCHES = (ROOT / "bench" / "README.md").read_text()


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    section = page.split(heading, 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines[2:]]


def test_the_documented_profile_is_accepted():
    text = (ROOT / "docs" / "policies.md").read_text()
    example = re.search(r"```json\n(.*?)```", text, re.DOTALL)[1]
    assert CostModel(json.loads(example)).prefill_s(1000) > 0


def test_every_documented_hint_is_accepted():
    values = {
        "string": "x",
        "bool": True,
        "string or list": ["a"],
        "seconds": 2.5,
        'seconds or `"5m"`': "5m",
        "integer": 1,
    }
    for name, kind, _ in rows(CONFIGURATION, "## Hints"):
        hint = {name.strip("`"): values[kind]}
        assert parse_hints({"ttlcache": hint}).rejected == ()
    example = re.search(r"```json\n(.*?)```", CONFIGURATION, re.DOTALL)[1]
    assert parse_hints(json.loads(example)["kv_transfer_params"]).tools == ("bash",)


@pytest.mark.parametrize("flag", re.findall(r"--kv-transfer-config '(.*?)'", README))
def test_every_printed_flag_is_valid(flag):
    transfer = json.loads(flag)
    assert transfer["kv_connector"] == "TTLConnector"
    assert transfer["kv_role"] == "kv_both"
    load_config(transfer.get("kv_connector_extra_config"))


@pytest.mark.parametrize(
    "target", sorted(set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)))
)
def test_every_named_make_target_exists(target):
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path",
    sorted(
        {
            *re.findall(r"\]\((docs/[\w.]+)\)", README),
            *re.findall(
                r"`((?:bench|docs|requirements|ttlcache|connector)/[\w./]*)`", README
            ),
        }
    ),
)
def test_every_named_path_exists(path):
    assert (ROOT / path).exists()


def test_the_benches_are_a_program_that_stops_its_servers(monkeypatch):
    stops = []
    monkeypatch.setattr(process, "stop_servers_on_signals", lambda: stops.append(1))
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("bench", run_name="__main__")
    assert (ended.value.code, stops) == (0, [1])


@pytest.mark.parametrize(
    "name", sorted({row[0].split()[1] for row in rows(BENCHES, "# The benches")})
)
def test_every_named_bench_command_exists(name):
    result = CliRunner().invoke(app, [name.strip("`"), "--help"])
    assert result.exit_code == 0, result.output
