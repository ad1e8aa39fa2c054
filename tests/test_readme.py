"""What README, and the tables that it links to, say is what the code does."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys

import pytest

from bench.serve import process
from tests.documented import PAGES, ROOT
from ttlcache.config import load_config
from ttlcache.programs.hints import parse_hints

README = (ROOT / "README.md").read_text()
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()


def example_in(page: str) -> dict:
    """The first block of JSON."""
    return json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])


def test_every_documented_hint_is_accepted():
    values = {
        "string": "x",
        "bool": True,
        "string or list": ["a"],
        "seconds": 2.5,
        'seconds or `"5m"`': "5m",
        "integer": 1,
    }
    section = CONFIGURATION.split("## Hints", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()
    assert len(table) > 2
    for line in table[2:]:
        name, kind, _ = (cell.strip() for cell in line.strip("|").split("|"))
        hint = {name.strip("`"): values[kind]}
        assert parse_hints({"ttlcache": hint}).rejected == ()
    assert parse_hints(example_in(CONFIGURATION)["kv_transfer_params"]).tools == (
        "bash",
    )


FLAGS = [
    pytest.param(flag, id=page.name)
    for page in PAGES
    for flag in re.findall(r"--kv-transfer-config '(.*?)'", page.read_text())
]


@pytest.mark.parametrize("flag", FLAGS)
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


@pytest.mark.parametrize(("page", "least"), [("README.md", 1), ("docs/design.md", 31)])
def test_every_named_path_exists(page, least):
    named = re.findall(
        r"`((?:bench|docs|requirements|ttlcache|connector)/[\w./]*)`",
        (ROOT / page).read_text(),
    )
    assert len(named) >= least
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_benches_are_a_program_that_stops_its_servers(monkeypatch):
    stops = []
    monkeypatch.setattr(process, "stop_servers_on_signals", lambda: stops.append(1))
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("bench", run_name="__main__")
    assert (ended.value.code, stops) == (0, [1])
