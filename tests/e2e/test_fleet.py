"""Two real replicas above one LMCache server, behind a real vllm-router.

What a client sees when its replica dies; tests/front has the router and `ttlcache
front` above replicas that are no engines.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from bench.compare.fleet.cluster import started
from bench.compare.fleet.router import Router
from bench.serve.server import ServerOptions
from tests.e2e.conftest import HANG_S, Agent
from tests.e2e.loads import BLOCK, KEPT, completion, first_prompt, tool_result
from ttlcache_connector.role.steps import CHECK_INVARIANTS

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

PROGRAMS = 10
OPTIONS = ServerOptions(
    num_blocks=300,
    max_model_len=4096,
    max_num_seqs=8,
    extra_env={CHECK_INVARIANTS: "1"},
)
CONFIG = {
    "policy": "fixed",
    "policy_options": {"ttl_s": 300.0},
    "demote": "write-through",
    "lmcache.mp.mq_timeout": 60.0,  # a busy machine is no outage
}


def ask(
    router: Router, index: int, prompt: list[int], **hints: Any
) -> tuple[int, list[int], int]:
    """One turn as an agent's client makes it: a failed request is sent again.

    Returns:
        The replica, the output's tokens, and how many of the prompt's were cached.
    """
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            answer = httpx.post(
                f"{router.base_url}/v1/completions",
                json=completion(prompt, hints),
                headers={"X-Session-ID": f"program-{index}"},
                timeout=HANG_S,
            )
            if answer.status_code == 200:
                break
            reason = answer.text
        except httpx.TransportError as error:
            reason = repr(error)
        assert time.monotonic() < deadline, reason
        time.sleep(0.5)
    told = answer.json()
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    replica = int(told["model"].removeprefix("replica-"))
    return replica, told["choices"][0]["token_ids"], cached


def reloads(replica: Agent) -> float:
    return replica.count("ttlcache_reloads_total", "tier", "lmcache")


def test_a_killed_replica_takes_no_program_along(tiny_model, tmp_path, vanilla):
    """SIGKILL in the middle of a stream; nothing is prefilled that LMCache holds."""
    expected = vanilla["uncached"]
    with (
        started(tiny_model, OPTIONS, 2, CONFIG, 0.25, tmp_path) as cluster,
        Router(cluster.urls, "consistent_hash", tmp_path / "router.log") as router,
        ThreadPoolExecutor(4) as pool,
    ):
        firsts = list(
            pool.map(
                lambda i: ask(router, i, first_prompt(i), tool="bash", ttl="300s"),
                range(PROGRAMS),
            )
        )
        replicas = [Agent(server) for server in cluster.replicas]
        chunks = PROGRAMS * KEPT // BLOCK
        assert cluster.tiers is not None
        for replica in replicas:
            assert replica.reaches(lambda: cluster.tiers.cpu_chunks() >= chunks)

        victim = firsts[0][0]
        survivor = replicas[1 - victim]
        came = reloads(survivor)
        with httpx.stream(
            "POST",
            f"{router.base_url}/v1/completions",
            json=completion(first_prompt(0), {"is_last_step": True}, 3000)
            | {"stream": True},
            headers={"X-Session-ID": "program-0"},
            timeout=HANG_S,
        ) as stream:
            lines = stream.iter_lines()
            begun = json.loads(next(lines).removeprefix("data: "))
            assert begun["model"] == f"replica-{victim}"
            cluster.kill(victim)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)

        def second(index: int) -> tuple[int, list[int], int]:
            context = first_prompt(index) + firsts[index][1]
            prompt = context + tool_result(index)
            return ask(router, index, prompt, is_last_step=True)

        seconds = list(pool.map(second, range(PROGRAMS)))
        assert [first[1] for first in firsts] == [e[0] for e in expected[:PROGRAMS]]
        assert seconds == [(1 - victim, e[1], KEPT) for e in expected[:PROGRAMS]]
        moved = sum(first[0] == victim for first in firsts)
        assert survivor.reaches(lambda: reloads(survivor) == came + moved > came)
        assert survivor.count("ttlcache_hook_errors_total") == 0
        assert survivor.server.errors_in_log() == []
