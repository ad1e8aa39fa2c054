"""When to copy KV down: bytes moved and job completion times of each `demote` mode.

The demo's programs on the demo's small pool, above a real LMCache server: one arm a
mode, one after the other, each with a server of its own, and the tier-less connector
as reference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.command import one_of, option
from bench.compare import demo_report
from bench.compare.demo import CONNECTOR, DemoOptions
from bench.compare.rounds import START_TIMEOUT_S, PairedRounds
from bench.serve import tiny_model
from bench.serve.arms import Arm, ArmResult, run_arm
from bench.tables import table

#: The arm without a lower tier.
NONE = "none"
WRITE_THROUGH = "write-through"
MODES = (NONE, WRITE_THROUGH, "on-pressure", "on-expiry")


@dataclass(frozen=True, slots=True)
class DemoteOptions(DemoOptions):
    """Chunks are a block of the demo's servers, so that no tail is lost."""

    modes: tuple[str, ...] = option(MODES, "Which, in this order, with commas between.")
    rounds: int = option(1, "How often each.", min=1)
    policy: str | None = option("adaptive", "Retention policy.")
    cpu_gb: float = option(2.0, "Size of the CPU tier.")
    chunk_tokens: int = 32
    out: Path = Path("out/demote")

    def __post_init__(self) -> None:
        for mode in self.modes:
            one_of("--modes", mode, MODES)


def demote(options: DemoteOptions, console: Console) -> int:
    """Bytes moved and completion times by when KV is copied down (needs LMCache)."""
    programs = options.workload()
    model = tiny_model.build(options.model)

    def play(mode: str, number: int) -> ArmResult:
        folder = options.out / f"{mode}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        extra, tiers = options.connector, None
        if mode != NONE:
            extra |= {"lower_tier": "lmcache", "demote": mode}
            tiers = options.tiers
        server = options.server({**CONNECTOR, "kv_connector_extra_config": extra})
        return run_arm(
            Arm(mode, server, START_TIMEOUT_S, tiers),
            model,
            programs,
            options.replay(),
            folder / "server.log",
        )

    def by_mode(done: list[dict[str, ArmResult]]) -> dict[str, list[ArmResult]]:
        return {mode: [o[mode] for o in done if mode in o] for mode in options.modes}

    def results(done: list[dict[str, ArmResult]]) -> tuple[dict[str, Any], list[str]]:
        arms = by_mode(done)
        every = [arm for own in arms.values() for arm in own]
        found = {
            mode: [demo_report.arm_json(arm) for arm in own]
            for mode, own in arms.items()
        }
        return {"arms": found}, demo_report.problems(every)

    rounds = PairedRounds(options.out, asdict(options), console, results)
    found = by_mode(rounds.play(options.modes, options.rounds, play))
    console.print(modes_table(found))
    for line in ratios(found):
        console.print(line)
    return rounds.status()


def modes_table(results: dict[str, list[ArmResult]]) -> Table:
    """A row a mode; means over the rounds."""
    rows = []
    for mode, arms in results.items():
        engines = [arm.engine for arm in arms]

        def moved(way: str, engines: Sequence[Any] = engines) -> str:
            sizes = [engine.tier_bytes.get(way, 0) for engine in engines]
            return f"{statistics.fmean(sizes) / 1e6:.1f}"

        tokens = [sum(engine.reloaded_tokens.values()) for engine in engines]
        outcomes = [
            f"{statistics.fmean(engine.pins.get(name, 0) for engine in engines):.0f}"
            for name in ("claimed", "expired", "victim")
        ]
        rows.append(
            [
                mode,
                " ".join(f"{arm.summary.mean_jct_s:.2f}" for arm in arms),
                f"{statistics.fmean(arm.summary.prompt_hit for arm in arms):.3f}",
                moved("demoted"),
                moved("promoted"),
                f"{statistics.fmean(tokens):.0f}",
                *outcomes,
            ]
        )
    columns = ["demote", "mean JCT s", "prompt hit", "MB down", "MB up"]
    columns += ["reloaded tokens", "claimed", "expired", "victim"]
    return table("when KV is copied down", columns, rows)


def ratios(results: dict[str, list[ArmResult]]) -> list[str]:
    """Each mode against write-through, round by round; medians, and all of them."""
    base = results.get(WRITE_THROUGH, [])
    lines = []
    for mode, arms in results.items():
        if mode in (WRITE_THROUGH, NONE) or not arms or len(arms) != len(base):
            continue
        pairs = list(zip(arms, base, strict=True))
        told = {
            "bytes down": [_down(one) / _down(other) for one, other in pairs],
            "mean JCT": [
                one.summary.mean_jct_s / other.summary.mean_jct_s
                for one, other in pairs
            ],
        }
        parts = (
            f"{name} {statistics.median(values):.2f}x "
            f"({', '.join(f'{value:.2f}' for value in values)})"
            for name, values in told.items()
        )
        lines.append(f"{mode} of write-through, round by round: {', '.join(parts)}")
    return lines


def _down(arm: ArmResult) -> float:
    return float(arm.engine.tier_bytes.get("demoted", 0)) or math.nan
