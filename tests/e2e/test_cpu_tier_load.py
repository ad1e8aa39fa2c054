"""500 turns through the CPU tier on a real vLLM: tokens, memory, a killed engine."""

from __future__ import annotations

import logging
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.serve.server import VLLMServer
from bench.stress.soak.watch import descendants, rss_mib
from tests.e2e.conftest import HANG_S, HOLD, Agent, engine_pid, start_server
from tests.e2e.models import window_model

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
log = logging.getLogger(__name__)

PROGRAMS, TURNS = 50, 10
FIRST_TOKENS, NEW_TOKENS = 100, 30
POOL_BLOCKS = 140
#: What a worker's memory may differ by from start to start.
SLACK_MIB = 64


def serve(model: Path, path: Path, extra: dict[str, Any] | None) -> VLLMServer:
    return start_server(model, path, extra, num_blocks=POOL_BLOCKS, max_model_len=1024)


def play(
    agent: Agent,
    numbers: range,
    contexts: dict[int, list[int]],
    fills: list[float] | None = None,
) -> list[list[int]]:
    """Each program's turns of these numbers; their tokens.

    fills: gets the tier's, as shares of its budget.
    """

    def turn(number: int, index: int) -> list[int]:
        rng = random.Random(f"{index}/{number}")
        length = NEW_TOKENS if number else FIRST_TOKENS
        new = [rng.randrange(5, 2048) for _ in range(length)]
        hints = {"program_id": f"p{index}", "tool": "bash"}
        choice = agent.ask([*contexts.get(index, ()), *new], hints=hints)
        contexts[index] = choice["context"]
        if fills is not None:
            used = agent.count("ttlcache_tier_used_bytes")
            fills.append(used / agent.count("ttlcache_tier_budget_bytes"))
        return list(choice["token_ids"])

    tokens = []
    with ThreadPoolExecutor(8) as pool:
        for number in numbers:
            tokens += pool.map(partial(turn, number), range(PROGRAMS))
    return tokens


def resident_mib(server: VLLMServer) -> float:
    """Of the engine's process and its worker."""
    engine = engine_pid(server)
    return sum(map(rss_mib, (engine, *descendants(engine))))


@pytest.mark.parametrize("shape", ["full attention", "sliding window beside it"])
def test_500_turns_and_a_killed_engine(tiny_model, tmp_path, shape):
    """A pool for a fifth of fifty programs, a tier that most of them outgrow."""
    model, cpu_gb = tiny_model, 0.065
    if shape != "full attention":
        model, cpu_gb = window_model(tmp_path / "model", tiny_model), 0.02
    contexts: dict[int, list[int]] = {}
    with serve(model, tmp_path / "plain.log", None) as server:
        expected = play(Agent(server), range(TURNS + 1), contexts)
        plain_mib = resident_mib(server)
    contexts, extra = {}, HOLD | {"lower_tier": "cpu", "cpu_gb": cpu_gb}
    with serve(model, tmp_path / "killed.log", extra) as server:
        agent, fills = Agent(server), []
        tokens = play(agent, range(TURNS), contexts, fills)
        assert tokens == expected[: TURNS * PROGRAMS]
        reloads = agent.count("ttlcache_reloads_total", "tier", "cpu")
        log.info("%d reloads, filled to %.3f", reloads, max(fills))
        assert reloads >= PROGRAMS
        assert 0.9 < max(fills) <= 1
        more_mib, budget_mib = resident_mib(server) - plain_mib, cpu_gb * 1e9 / 2**20
        log.info("%.0f MiB more than plain vLLM", more_mib)
        assert more_mib <= budget_mib + SLACK_MIB
        assert agent.count("ttlcache_hook_errors_total") == 0
        assert server.errors_in_log() == []
        process, engine = server._process, psutil.Process(engine_pid(server))
        holders = [engine, *engine.children(recursive=True)]
        os.kill(engine.pid, signal.SIGKILL)
        process.wait(HANG_S)
        gone, _ = psutil.wait_procs(holders, HANG_S)
        assert len(gone) == len(holders)  # and their memory
    with serve(model, tmp_path / "restarted.log", extra) as server:
        tokens = play(Agent(server), range(TURNS, TURNS + 1), contexts)
        assert tokens == expected[TURNS * PROGRAMS :]
        assert server.errors_in_log() == []
