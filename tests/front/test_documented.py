"""The commands of docs/fleet.md: the router takes them, and so does the front."""

from __future__ import annotations

import json
import random
import re
import subprocess
import tracemalloc
from collections.abc import Callable

import pytest
import typer

from bench.compare.fleet.router import SETTINGS, STICKY_IDLE
from tests.documented import ROOT, commands
from tests.front.conftest import HANG_S, front_before
from ttlcache.cli import app
from ttlcache.config import load_config
from ttlcache_connector.front.prompts import MAX_PROMPTS, STEP_BYTES, PromptMemory

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


def test_the_page_sets_what_the_benches_set():
    (line,) = [c.text for c in commands() if c.text.startswith("export VLLM_ROUTER")]
    assert dict([line.removeprefix("export ").split("=")]) == STICKY_IDLE
    assert ASKS
    (router,) = [c.text for c in STARTS if c.words[0] == "vllm-router"]
    assert "sticky_least_loaded" in router
    assert " ".join(SETTINGS) in router


def test_the_defaults_are_those_of_the_command():
    params = {p.name: p for p in typer.main.get_command(app).commands["front"].params}
    told = re.findall(r"`--([a-z-]+)`\s+\(([\d.]+)\)", PAGE)
    assert len(told) == 2
    for option, value in told:
        assert params[option.replace("-", "_")].default == float(value), option


def test_status_tells_what_the_page_lists():
    front = front_before()
    listed = PAGE.split("`/front/status` tells")[1].split("`date`")[0]
    assert set(re.findall(r"`([a-z_]+)`", listed)) == set(front.status())


def prompts_mb(rest_bytes: Callable[[], int]) -> float:
    """Memory of all prompts that the front remembers, from a tenth of them."""
    rng = random.Random(1)
    tracemalloc.start()
    try:
        memory = PromptMemory(max_prompts=MAX_PROMPTS // 10)
        for _ in range(MAX_PROMPTS // 10):
            memory.key(rng.randbytes(STEP_BYTES + rest_bytes()))
        return 10 * tracemalloc.get_traced_memory()[0] / 1e6
    finally:
        tracemalloc.stop()


def test_prompts_take_the_memory_that_the_page_tells():
    number, usual_mb, most_mb = re.search(
        r"([\d,]+)\s+prompts at most \((\d+) MB as a rule, at most (\d+) MB\)", PAGE
    ).groups()
    assert int(number.replace(",", "")) == MAX_PROMPTS
    rng = random.Random(2)
    usual = prompts_mb(lambda: rng.randrange(STEP_BYTES))
    assert usual == pytest.approx(int(usual_mb), rel=0.15)
    most = prompts_mb(lambda: STEP_BYTES - 1)
    assert 0.8 * int(most_mb) < most < int(most_mb)


def test_replicas_write_through():
    flags = re.findall(r"--kv-transfer-config '(.*?)'", PAGE)
    extras = [json.loads(flag)["kv_connector_extra_config"] for flag in flags]
    assert {load_config(extra).demote for extra in extras} == {"write-through"}
