"""`python -m bench overhead`: what ttlcache itself costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.command import option, write_json
from bench.micro import overhead_recorder, overhead_report


@dataclass(frozen=True, slots=True)
class OverheadOptions:
    """One of three scopes, and its sizes."""

    core: bool = option(False, "The core alone, without vLLM.", "--core")
    scheduler: bool = option(
        False, "TTLScheduler against plain vLLM, paired.", "--scheduler"
    )
    recorder: bool = option(False, "Recorder and metrics, a step.", "--recorder")
    steps: int | None = option(
        None, "Steps of --recorder (20000) or --scheduler (600).", min=20
    )
    json_path: Path | None = option(None, "Write all numbers to this file.", "--json")
    programs: int = option(1_000_000, "Programs sent through the controller.", min=10)
    idle_programs: int = option(
        50_000, "Live idle programs whose bytes are counted.", min=100
    )
    repeats: int = option(2_000, "Timed calls of each kind.", min=50)
    events: int = option(1_000_000, "Events whose memory --recorder watches.", min=1000)

    def __post_init__(self) -> None:
        if self.core + self.recorder + self.scheduler != 1:
            raise ValueError("say --core, --recorder or --scheduler")


def overhead(options: OverheadOptions, console: Console) -> int:
    """What ttlcache itself costs: microseconds and bytes. Exit status 1: bar missed."""
    found, passed = _measure(options, console)
    if options.json_path is not None:
        write_json(options.json_path, found)
    return 0 if passed else 1


def _measure(options: OverheadOptions, console: Console) -> tuple[dict[str, Any], bool]:
    if options.recorder:
        cost = overhead_recorder.measure(options.steps or 20_000, options.events)
        return overhead_recorder.to_json(cost), overhead_recorder.report(cost, console)
    if options.scheduler:
        # Here: only this scope needs vLLM.
        from bench.micro import overhead_scheduler

        steps = options.steps or 600
        paired = overhead_scheduler.run(steps, console)
        passed = overhead_scheduler.print_table(paired, console)
        return overhead_scheduler.to_json(paired, steps), passed
    result = overhead_report.run(
        options.programs, options.idle_programs, options.repeats, console
    )
    passed = overhead_report.print_bars(result, console)
    return overhead_report.to_json(result), passed
