"""The fleet demo: the same agents through a router, one arm a routing policy."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from bench.compare import demo_report
from bench.compare.demo import DemoOptions
from bench.compare.fleet import plot, report
from bench.compare.fleet.arms import (
    ARMS,
    REFERENCE,
    ROUND_ROBIN,
    SESSION,
    WITH_TIER,
    FleetArm,
    FleetResult,
    FleetSetting,
    arm_json,
    run_arm,
)
from bench.serve import tiny_model
from bench.sim.metrics import compare_outputs
from bench.sim.workloads import Program


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Sizes of the demo; the defaults took 16 minutes of CPU time on a busy machine."""

    arms: tuple[str, ...] = (
        REFERENCE,
        ROUND_ROBIN,
        "cache-aware",
        SESSION,
        ROUND_ROBIN + WITH_TIER,
        SESSION + WITH_TIER,
    )
    programs: int = 8
    rate: float = 1.5
    """Program arrivals per second."""
    replicas: int = 2
    blocks: int = 320
    """KV pool of each replica, in blocks of 32 tokens."""
    token_scale: float = 0.06
    gap_cap_s: float = 4.0
    seed: int = 0
    tier_gb: float = 0.5
    kill_at_turn: int | None = None
    out: Path = Path("out/fleet")
    model: Path = Path("out/models/tiny")
    connector_config: Mapping[str, Any] = field(default_factory=dict)

    def setting(self, model: Path) -> FleetSetting:
        return FleetSetting(
            model,
            self._demo().server(None),
            self.replicas,
            self.connector_config,
            self.tier_gb,
            self.out,
            self.seed,
            self.kill_at_turn,
        )

    def workload(self) -> tuple[Program, ...]:
        """The demo's programs."""
        return self._demo().workload()

    def _demo(self) -> DemoOptions:
        return DemoOptions(
            programs=self.programs,
            rate=self.rate,
            blocks=self.blocks,
            token_scale=self.token_scale,
            gap_cap_s=self.gap_cap_s,
            seed=self.seed,
        )


def run(options: FleetOptions, console: Console) -> int:
    """Run all arms, write result.json and fleet.png, print the table.

    Returns:
        The exit status: 1 when outputs differ from the first arm's, a program did
        not finish or a server logged an error.
    """
    programs = options.workload()
    options.out.mkdir(parents=True, exist_ok=True)
    setting = options.setting(tiny_model.build(options.model))
    num_turns = sum(len(program.turns) for program in programs)
    console.print(
        f"{len(programs)} programs, {num_turns} turns; {options.replicas} replicas "
        f"with a KV pool of {options.blocks * 32:,} tokens each",
        soft_wrap=True,
    )
    results: list[FleetResult] = []
    for name in options.arms:
        results.append(_run(ARMS[name], setting, programs, console))
        found = _write(results, options)
    console.print(report.table(results))
    for line in report.deaths(results):
        console.print(line, soft_wrap=True)
    console.print(f"result: {options.out / 'result.json'}", soft_wrap=True)
    console.print(
        f"plot:   {plot.draw(results, options.out / 'fleet.png')}", soft_wrap=True
    )
    for problem in found:
        console.print(f"[red]problem:[/] {escape(problem)}", soft_wrap=True)
    return 1 if found else 0


def _run(
    arm: FleetArm,
    setting: FleetSetting,
    programs: Sequence[Program],
    console: Console,
) -> FleetResult:
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("turns"),
        TimeElapsedColumn(),
    )
    num_turns = sum(len(program.turns) for program in programs)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{arm.name}: starting vLLM", total=num_turns)
        result = run_arm(
            arm,
            setting,
            programs,
            lambda _: progress.update(
                task, advance=1, description=f"{arm.name}: replaying"
            ),
        )
        progress.update(task, description=f"{arm.name}: done")
    return result


def _write(results: Sequence[FleetResult], options: FleetOptions) -> list[str]:
    """What is known so far, after every arm; returns its problems."""
    outputs = {
        result.name: compare_outputs(results[0].records, result.records)
        for result in results
    }
    found = [p for r in results for p in report.problems(r, outputs[r.name])]
    written = {
        "arms": {
            result.name: {
                **arm_json(result),
                "tokens_identical": outputs[result.name].tokens_identical,
                "first_token_logprob_max_diff": outputs[
                    result.name
                ].first_token_logprob_max_diff,
                "migration": report.migration(result),
            }
            for result in results
        },
        "problems": found,
        "versions": demo_report.versions(),
        "cpu_count": os.cpu_count(),
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "options": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in asdict(options).items()
        },
    }
    path = options.out / "result.json"
    path.write_text(json.dumps(written, indent=1) + "\n")
    return found
