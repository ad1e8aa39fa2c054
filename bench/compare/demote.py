"""When to copy KV down: bytes moved and job completion times of each `demote` mode.

The demo's programs on the demo's small pool, above a real LMCache server: one arm a
mode, one after the other, each with a server of its own, and the tier-less connector
as reference.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.compare import demo_report
from bench.compare.demo import CONNECTOR, DemoOptions
from bench.serve import tiny_model
from bench.serve.arms import Arm, ArmResult, run_arm

#: The arm without a lower tier.
NONE = "none"
RESULT = "result.json"
WRITE_THROUGH = "write-through"
MODES = (NONE, WRITE_THROUGH, "on-pressure", "on-expiry")
#: An arm takes minutes: a machine that is busy for a while must not cost it.
START_TIMEOUT_S = 600.0
#: Tokens of one chunk: a block of the demo's servers, so that no tail is lost.
CHUNK_TOKENS = 32


def run(
    options: DemoOptions,
    modes: Sequence[str],
    cpu_gb: float,
    rounds: int,
    console: Console,
) -> int:
    """Every mode `rounds` times, in turn; writes result.json, prints the table.

    Returns:
        The exit status: 1 when a request failed, a server logged an error, or outputs
        differ between arms.
    """
    programs = options.workload()
    model = tiny_model.build(options.model)
    results: dict[str, list[ArmResult]] = {mode: [] for mode in modes}
    found: list[str] = []
    for number in range(rounds):
        for mode in modes if number % 2 == 0 else tuple(reversed(modes)):
            console.print(f"round {number + 1} of {rounds}: {mode}")
            folder = options.out / f"{mode}-{number}"
            results[mode].append(
                _run_mode(mode, model, programs, options, cpu_gb, folder)
            )
            found = _write(results, options)
    console.print(table(results))
    for line in ratios(results):
        console.print(line)
    console.print(f"result: {options.out / RESULT}", soft_wrap=True)
    for problem in found:
        console.print(f"[red]problem:[/] {problem}", soft_wrap=True)
    return 1 if found else 0


def _write(results: dict[str, list[ArmResult]], options: DemoOptions) -> list[str]:
    """What is known so far, after every arm; returns its problems."""
    done = [arm for arms in results.values() for arm in arms]
    found = demo_report.problems(done)
    result = {
        "arms": {
            mode: [demo_report.arm_json(arm) for arm in arms]
            for mode, arms in results.items()
        },
        **demo_report.context_json(found, asdict(options)),
    }
    (options.out / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    return found


def table(results: dict[str, list[ArmResult]]) -> Table:
    """A row a mode; means over the rounds."""
    grid = Table(title="when KV is copied down", title_justify="left")
    for name in ("demote", "mean JCT s", "prompt hit", "MB down", "MB up"):
        grid.add_column(name, justify="left" if name == "demote" else "right")
    for name in ("reloaded tokens", "claimed", "expired", "victim"):
        grid.add_column(name, justify="right")
    for mode, arms in results.items():
        if not arms:
            continue
        engines = [arm.engine for arm in arms]
        down = _mean([e.tier_bytes.get("demoted", 0) for e in engines]) / 1e6
        up = _mean([e.tier_bytes.get("promoted", 0) for e in engines]) / 1e6
        tokens = _mean([sum(e.reloaded_tokens.values()) for e in engines])
        outcomes = [
            f"{_mean([e.pins.get(name, 0) for e in engines]):.0f}"
            for name in ("claimed", "expired", "victim")
        ]
        grid.add_row(
            mode,
            " ".join(f"{arm.summary.mean_jct_s:.2f}" for arm in arms),
            f"{_mean([arm.summary.prompt_hit for arm in arms]):.3f}",
            f"{down:.1f}",
            f"{up:.1f}",
            f"{tokens:.0f}",
            *outcomes,
        )
    return grid


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


def _run_mode(
    mode: str,
    model: Path,
    programs: Any,
    options: DemoOptions,
    cpu_gb: float,
    folder: Path,
) -> ArmResult:
    folder.mkdir(parents=True, exist_ok=True)
    extra = dict(options.connector_config)
    tiers = None
    if mode != NONE:
        extra |= {"lower_tier": "lmcache", "demote": mode}
        tiers = replace(options.tiers, cpu_gb=cpu_gb, chunk_tokens=CHUNK_TOKENS)
    connector = {**CONNECTOR, "kv_connector_extra_config": extra}
    return run_arm(
        Arm(mode, options.server(connector), START_TIMEOUT_S, tiers),
        model,
        programs,
        options.replay(),
        folder / "server.log",
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
