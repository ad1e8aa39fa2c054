"""vLLM above a real LMCache server, and what a client does to the pair.

Written through, so that a turn's KV is below as soon as it is computed; in
tests/e2e/tier_bytes every way of copying is compared byte by byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.serve.server import VLLMServer, by_label
from bench.serve.tier_server import TierServer
from tests.e2e.conftest import Agent, start_server
from tests.e2e.loads import first_prompt, tool_result

#: The longest there is (`max_ttl_s`): what is gone was told to go.
TTL_S = 300.0


class AboveTier(Agent):
    """Programs of two turns, each under its name's salt: they share nothing."""

    def __init__(self, server: VLLMServer, tiers: TierServer) -> None:
        super().__init__(server)
        self.tiers = tiers

    def first(self, index: int, name: str, **hints: Any) -> dict[str, Any]:
        hints = {"program_id": f"{name}-{index}", "tool": "bash"} | hints
        headers = {"X-Request-Id": f"request-{name}-{index}"}
        prompt = first_prompt(index)
        return self.ask(prompt, hints=hints, headers=headers, cache_salt=name)

    def second(self, first: dict[str, Any], index: int, name: str) -> dict[str, Any]:
        hints = {"program_id": f"{name}-{index}", "is_last_step": True}
        prompt = first["context"] + tool_result(index)
        return self.ask(prompt, hints=hints, cache_salt=name)

    def reloads(self) -> tuple[int, int]:
        """So many from CPU memory, so many from disk; they are told a little later."""
        self.settle()
        found = by_label(self.server.metrics(), "ttlcache_reloads_total", "tier")
        assert not found["unknown"]
        return round(found["cpu"]), round(found["disk"])


@contextlib.contextmanager
def serving(
    tiers: TierServer, model: Path, log: Path, num_blocks: int, **more: Any
) -> Iterator[AboveTier]:
    """Checked at the end: no error, and no block is referenced by what has ended.

    Args:
        more: of the connector's configuration; `extra_args` are vLLM's.
    """
    extra_args = more.pop("extra_args", ())
    extra = {
        "policy": "fixed",
        "policy_options": {"ttl_s": TTL_S},
        "max_pinned_fraction": 1.0,
        "demote": "write-through",
        **tiers.options.connector_config(),
        "lmcache.mp.mq_timeout": 60.0,  # a busy machine is no outage
        **more,
    }
    with start_server(
        model, log, extra, num_blocks=num_blocks, extra_args=extra_args
    ) as server:
        agent = AboveTier(server, tiers)
        yield agent
        agent.empty_gpu()
        agent.settle()
        assert agent.count("ttlcache_hook_errors_total") == 0
        assert agent.count("ttlcache_free_blocks") == num_blocks - 1
        assert server.errors_in_log() == []
