"""The commands of docs/fleet.md: the router takes them, and so does the front."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
import typer

from tests.documented import ROOT, of_fleets
from tests.front.conftest import HANG_S
from ttlcache.cli import app
from ttlcache.config import load_config

STARTS = [c for c in of_fleets() if c.words[0] != "curl"]
ASKS = [c for c in of_fleets() if c.words[0] == "curl"]
PAGE = (ROOT / "docs" / "fleet.md").read_text()


@pytest.mark.parametrize("command", STARTS, ids=lambda c: c.text)
def test_commands_that_start_something_are_accepted(command):
    if command.words[0] == "vllm-router":
        from vllm_router.launch_router import parse_router_args

        args = parse_router_args(command.words[1:])
        assert args.policy == "consistent_hash"
        assert len(args.worker_urls) == 2
        return
    front = typer.main.get_command(app).commands["front"]
    context = front.make_context("front", command.words[2:])
    assert context.params["upstream"].startswith("http://")


@pytest.mark.parametrize("command", ASKS, ids=lambda c: c.text)
def test_commands_that_ask_the_router(command, router, upstreams):
    worker = upstreams["left"].base_url
    text = command.text.replace("http://127.0.0.1:30000", router.base_url)
    text = text.replace("http://127.0.0.1:8001", worker)
    done = subprocess.run(
        ["bash", "-c", f"{text} --fail --silent"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert worker in done.stdout
    router.add(worker)


def test_the_page_has_all_kinds_of_commands():
    assert len(STARTS) >= 3
    assert ASKS


@pytest.mark.parametrize("flag", re.findall(r"--kv-transfer-config '(.*?)'", PAGE))
def test_every_printed_flag_is_valid(flag):
    transfer = json.loads(flag)
    assert transfer["kv_connector"] == "TTLConnector"
    assert load_config(transfer["kv_connector_extra_config"]).demote == "write-through"
