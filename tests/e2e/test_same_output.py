"""Greedy outputs with TTLConnector are vanilla vLLM's, token for token."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.stress.soak.watch import descendants

pytestmark = pytest.mark.e2e

PROGRAMS = 8
TURNS = 4


def one_program(agent: Any, index: int, hints: bool) -> list[dict[str, Any]]:
    """An agent of four turns whose context grows to about 700 tokens."""
    rng = random.Random(index)
    context: list[int] = []
    answers = []
    for turn in range(TURNS):
        context += [rng.randrange(5, 2048) for _ in range(150)]
        own = {"program_id": f"same-{index}", "is_last_step": turn == TURNS - 1}
        choice = agent.ask(context, max_tokens=16, hints=own if hints else None)
        context = choice["context"]
        answers.append(
            {
                "token_ids": choice["token_ids"],
                "logprobs": choice["logprobs"]["token_logprobs"],
                "cached_tokens": choice["cached_tokens"],
            }
        )
    return answers


def record(agent: Any, hints: bool = False) -> dict[str, Any]:
    """Eight concurrent programs on a pool that holds six of them at the end.

    cpu_s: CPU seconds that the server's processes spent on it.
    """
    before_s = cpu_s(agent.server.pid)
    with ThreadPoolExecutor(PROGRAMS) as pool:
        programs = list(
            pool.map(lambda i: one_program(agent, i, hints), range(PROGRAMS))
        )
    return {"programs": programs, "cpu_s": cpu_s(agent.server.pid) - before_s}


def cpu_s(pid: int) -> float:
    """CPU seconds so far of a process and all its descendants."""
    ticks = 0
    for each in (pid, *descendants(pid)):
        stat = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(stat[11]) + int(stat[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_tokens_and_first_logprobs_equal_vanilla(agent, vanilla):
    ours = record(agent, hints=True)
    for mine, theirs in zip(ours["programs"], vanilla["programs"], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a["token_ids"] == b["token_ids"]
            assert a["logprobs"][0] == pytest.approx(b["logprobs"][0], abs=1e-3)
    cached = [turn["cached_tokens"] for p in ours["programs"] for turn in p[1:]]
    assert min(cached) > 0
    assert agent.pins("claimed") > 0
