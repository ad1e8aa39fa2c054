"""When to copy KV down: bytes moved and job completion times of each `demote` mode.

The demo's programs on the demo's small pool, above a real LMCache server: one arm a
mode, and the connector without a tier as reference.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.command import one_of, option
from bench.compare.demo import CONNECTOR
from bench.compare.settings import Rounds, RoundsOptions, measure
from bench.serve.arms import EngineCounters
from bench.tables import table

#: The arm without a lower tier.
NONE = "none"
MODES = ("write-through", "on-pressure", "on-expiry", NONE)


@dataclass(frozen=True, slots=True)
class DemoteOptions(RoundsOptions):
    """Chunks are a block of the demo's servers, so that no tail is lost."""

    modes: tuple[str, ...] = option(
        MODES, "Which, with commas between; the others are compared with the first one."
    )
    rounds: int = option(1, "How often each.", min=1)
    policy: str | None = option("adaptive", "Retention policy.")
    programs: int = 12
    blocks: int = 384
    cpu_gb: float = 2.0
    chunk_tokens: int = 32
    out: Path = Path("out/demote")

    def __post_init__(self) -> None:
        for mode in self.modes:
            one_of("--modes", mode, MODES)


def demote(options: DemoteOptions, console: Console) -> int:
    """Bytes moved and completion times by when KV is copied down (needs LMCache)."""
    settings = {}
    for mode in options.modes:
        tier = {} if mode == NONE else {"lower_tier": "lmcache", "demote": mode}
        settings[mode] = {**CONNECTOR, "kv_connector_extra_config": tier}
    done, status = measure(options, settings, console)
    console.print(modes_table(done, options.modes))
    return status


def modes_table(done: Rounds, modes: Sequence[str]) -> Table:
    """A row a mode: MB copied down in each round, means of the rest."""
    rows = []
    for mode in modes:
        engines = [one[mode].engine for one in done]

        def mean(of: Callable[[EngineCounters], float], own: Any = engines) -> str:
            return f"{statistics.fmean(map(of, own)):.0f}"

        down = (f"{each.tier_bytes.get('demoted', 0) / 1e6:.1f}" for each in engines)
        rows.append(
            [
                mode,
                " ".join(down),
                mean(lambda engine: engine.tier_bytes.get("promoted", 0) / 1e6),
                mean(lambda engine: sum(engine.reloaded_tokens.values())),
                mean(lambda engine: engine.pins.get("claimed", 0)),
                mean(lambda engine: engine.pins.get("expired", 0)),
                mean(lambda engine: engine.pins.get("victim", 0)),
            ]
        )
    columns = ["demote", "MB down", "MB up", "reloaded tokens"]
    columns += ["claimed", "expired", "victim"]
    return table("when KV is copied down", columns, rows)
