"""The commands of docs/fleet.md: the router takes them, and so does the front."""

import json
import re
import subprocess

import pytest
import typer

from tests.documented import ROOT, commands
from tests.front.conftest import HANG_S, front_before
from ttlcache.cli.main import app
from ttlcache.config import load_config

STARTS = [c for c in commands("fleet") if c.words[0] != "curl"]
ASKS = [c for c in commands("fleet") if c.words[0] == "curl"]
PAGE = (ROOT / "docs" / "fleet.md").read_text()


@pytest.mark.parametrize("command", STARTS, ids=lambda c: c.text)
def test_commands_that_start_something_are_accepted(command):
    if command.words[0] == "vllm-router":
        from vllm_router.launch_router import parse_router_args

        args = parse_router_args(command.words[1:])
        assert args.policy == "sticky_least_loaded"
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


def test_the_defaults_are_those_of_the_command():
    params = {p.name: p for p in typer.main.get_command(app).commands["front"].params}
    told = re.findall(r"`--([a-z-]+)`\s+\(([\d.]+)\)", PAGE)
    assert len(told) == 1
    for option, value in told:
        assert params[option.replace("-", "_")].default == float(value), option


def test_status_tells_what_the_page_lists():
    front = front_before()
    listed = PAGE.split("`/front/status` tells")[1].split("`date`")[0]
    assert set(re.findall(r"`([a-z_]+)`", listed)) == set(front.status())


def test_replicas_write_through():
    flags = re.findall(r"--kv-transfer-config '(.*?)'", PAGE)
    extras = [json.loads(flag)["kv_connector_extra_config"] for flag in flags]
    assert {load_config(extra).demote for extra in extras} == {"write-through"}
