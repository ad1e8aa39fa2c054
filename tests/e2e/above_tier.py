"""vLLM above a lower tier, and what a client does to the pair.

In tests/e2e/tier_bytes every way of copying is compared byte by byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.serve.server import VLLMServer
from bench.serve.tier_server import TierServer
from tests.e2e.conftest import HOLD, Agent, start_server
from tests.e2e.loads import first_prompt, tool_result


class AboveTier(Agent):
    """Programs of two turns, each under its name's salt: they share nothing."""

    def __init__(self, server: VLLMServer, tiers: TierServer | None) -> None:
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

    def reloads(self) -> int:
        """They are told a little later."""
        self.settle()
        return round(self.count("ttlcache_reloads_total"))


@contextlib.contextmanager
def serving(
    model: Path,
    log: Path,
    num_blocks: int,
    extra: dict[str, Any],
    *,
    tiers: TierServer | None = None,
    extra_args: tuple[str, ...] = (),
) -> Iterator[AboveTier]:
    """Checked at the end: no error, and no block is referenced by what has ended.

    Args:
        extra: of the connector's configuration.
        tiers: below it; written through, so that a turn's KV is there as soon as it is
            computed.
    """
    if tiers is not None:
        below = tiers.options.connector_config()
        patience = {"lmcache.mp.mq_timeout": 60.0}  # a busy machine is no outage
        extra = {"demote": "write-through", **below, **patience, **extra}
    with start_server(
        model,
        log,
        HOLD | extra,
        num_blocks=num_blocks,
        max_model_len=1024,
        extra_args=extra_args,
    ) as server:
        agent = AboveTier(server, tiers)
        yield agent
        agent.is_unharmed()
