"""`python -m bench overhead`: what ttlcache itself costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.command import option, write_json
from bench.micro import overhead_core


@dataclass(frozen=True, slots=True)
class OverheadOptions:
    """One of two scopes, and its sizes."""

    core: bool = option(False, "The core alone, without vLLM.", "--core")
    scheduler: bool = option(
        False, "TTLScheduler against plain vLLM, paired.", "--scheduler"
    )
    steps: int = option(600, "Steps of --scheduler.", min=20)
    json_path: Path | None = option(None, "Write all numbers to this file.", "--json")
    programs: int = option(1_000_000, "Programs sent through the controller.", min=10)
    idle_programs: int = option(
        50_000, "Live idle programs whose bytes are counted.", min=100
    )
    repeats: int = option(2_000, "Timed calls of each kind.", min=50)

    def __post_init__(self) -> None:
        if self.core + self.scheduler != 1:
            raise ValueError("say --core or --scheduler")


def overhead(options: OverheadOptions, console: Console) -> int:
    """What ttlcache itself costs: microseconds and bytes. Exit status 1: bar missed."""
    found, passed = _measure(options, console)
    if options.json_path is not None:
        write_json(options.json_path, found)
    return 0 if passed else 1


def _measure(options: OverheadOptions, console: Console) -> tuple[dict[str, Any], bool]:
    if options.scheduler:
        # Here: only this scope needs vLLM.
        from bench.micro import overhead_scheduler

        paired = overhead_scheduler.run(options.steps, console)
        passed = overhead_scheduler.print_table(paired, console)
        return overhead_scheduler.to_json(paired, options.steps), passed
    result = overhead_core.run(
        options.programs, options.idle_programs, options.repeats, console
    )
    passed = overhead_core.print_bars(result, console)
    return overhead_core.to_json(result), passed
