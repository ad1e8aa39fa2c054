"""vLLM above a real LMCache server: outages of each kind, and a hybrid model."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.serve.tier_server import TierServer
from tests.e2e.above_tier import AboveTier, serving
from tests.e2e.loads import BLOCK, KEPT, PROGRAMS
from tests.e2e.models import window_model
from tests.waiting import becomes
from ttlcache_connector.lmcache_server.launch import TierOptions

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

NO_ANSWER = "the lower tier does not answer"
#: LMCache's own default: an answer that takes longer is an outage.
TIMEOUT = {"lmcache.mp.mq_timeout": 2.0}


def test_a_server_that_stops_dies_and_comes_back(vanilla, tiny_model, tmp_path):
    """100 turns over one outage of each kind, above a server that is always full."""
    expected = vanilla["uncached"]
    options = TierOptions(cpu_gb=0.02, chunk_tokens=BLOCK)
    log = tmp_path / "vllm.log"
    with (
        TierServer(options, tmp_path / "lmcache.log") as tiers,
        serving(tiny_model, log, 700, TIMEOUT, tiers=tiers) as agent,
    ):
        seconds: list[float] = []

        def turn(index: int) -> dict[str, Any]:
            began = time.monotonic()
            answer = agent.first(index % PROGRAMS, f"out{index}", ttl="1s")
            seconds.append(time.monotonic() - began)
            assert answer["token_ids"] == expected[index % PROGRAMS][0]
            return answer

        def load(begin: int, end: int) -> None:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(turn, range(begin, end)))

        load(0, 25)
        usual = max(seconds)
        with ThreadPoolExecutor(1) as other:
            running = other.submit(load, 25, 50)
            tiers.pause()  # answers nothing, is not gone
            running.result()
            tiers.resume()
            agent.empty_gpu()
            running = other.submit(load, 50, 75)
            tiers.kill()
            running.result()
            load(75, 90)
            tiers.start()
            load(90, 100)
        # A slow machine is slow without an outage, too.
        assert max(seconds) < 5.0 + 5 * usual
        assert hits_resume(agent, expected[3][1])
        told = log.read_text().count(NO_ANSWER)
        assert told == agent.count("ttlcache_tier_outages_total") >= 1
        assert log.read_text().count("takes no hints") == 1, "it has no such module"


def hits_resume(agent: AboveTier, expected: list[int]) -> bool:
    """The server came back empty, and evicts once a second while it is full."""

    def is_reloaded() -> bool:
        before = agent.reloads()
        name = f"back-{time.monotonic()}"
        first = agent.first(3, name)
        agent.empty_gpu()
        assert agent.second(first, 3, name)["token_ids"] == expected
        time.sleep(0.5)
        return agent.reloads() == before + 1

    return becomes(is_reloaded, 90.0)


def test_a_hybrid_model_has_the_tier_where_it_has_one_kv_cache_group(
    tiny_model, tmp_path
):
    """With two it has none: tests/connector/test_lower_ranks.py."""
    model = window_model(tmp_path / "model", tiny_model)
    options = TierOptions(cpu_gb=0.25, chunk_tokens=BLOCK)
    log = tmp_path / "vllm.log"
    flag = ("--disable-hybrid-kv-cache-manager",)
    with (
        TierServer(options, tmp_path / "lmcache.log") as tiers,
        serving(model, log, 200, {}, tiers=tiers, extra_args=flag) as agent,
    ):
        assert "no lower tier" not in log.read_text()
        first = agent.first(7, "hybrid")
        fresh = agent.second(first, 7, "other")
        assert fresh["cached_tokens"] == 0
        agent.empty_gpu()
        second = agent.second(first, 7, "hybrid")
        assert second["token_ids"] == fresh["token_ids"]
        assert second["cached_tokens"] == KEPT
        assert agent.count("ttlcache_tier_bytes_total") > 0  # by our own copier
