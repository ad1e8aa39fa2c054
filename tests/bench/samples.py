"""Turns that were served, traces that were recorded, and logs of others.

`logs/` has a small log in the shape of every format that `ttlcache_sim.load.readers`
knows. Each is one agent with three turns: prompts of 1000, 1100 and 1300 tokens where
the format counts them, outputs of 50, 60 and 70; `pytest` runs for 4 s, then a file is
read for half a second. In a log of requests those of another agent lie between them.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.fake_engine import FakeEngine
from ttlcache.telemetry.events import Telemetry
from ttlcache.telemetry.recorder import Recorder
from ttlcache_sim.metrics import TurnRecord


def log_sample(name: str) -> str:
    return (Path(__file__).parent / "logs" / name).read_text()


def served(
    program_id: str = "agent", turn: int = 0, arrival_s: float = 0.0, **changes: Any
) -> TurnRecord:
    """Half a second in the queue, two seconds in all."""
    record = {
        "first_token_s": arrival_s + 1.0,
        "departure_s": arrival_s + 2.0,
        "queue_s": 0.5,
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "output_token_ids": (7,),
        "first_logprob": -1.0,
    }
    return TurnRecord(program_id, turn, arrival_s, **{**record, **changes})


def recorded(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A line of a trace: a program that calls `search` after each turn."""
    base = {"new_prompt_tokens": 90, "output_tokens": 10, "tool": "search"}
    filled = [{**base, "tool_s": None, **turn} for turn in turns]
    return {"program_id": "p", "arrival_s": None, "turns": filled, **fields}


def write_trace(path: Path, *programs: dict[str, Any] | str) -> Path:
    """Programs as JSON, or lines as they are."""
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        for program in programs:
            text = program if isinstance(program, str) else json.dumps(program)
            lines.write(text + "\n")
    return path


def record_job(folder: Path) -> Path:
    """A recording of a program called job-17, of two turns."""
    telemetry = Telemetry(recorder=Recorder(folder, {}, run="1-1"))
    engine = FakeEngine({"policy": "fixed"}, telemetry=telemetry)
    context = engine.turn("r1", list(range(20)), [50], program="job-17", tool="pytest")
    engine.step(seconds=1.0)
    engine.turn("r2", [*context, 1], [51], program="job-17", is_last_step=True)
    telemetry.close()
    return folder


def grid_row(load: float = 1.1, **over_base: float) -> dict[str, Any]:
    """A cell of a grid whose every ratio is known exactly; its base takes 100 s."""
    numbers = ("mean_jct_s", "p50_jct_s", "p95_jct_s", "p99_jct_s", "worst_turn_s")
    arms = {
        arm: dict.fromkeys((*numbers, "p95_ttft_s"), 100.0 * ratio)
        | {"over_base": [ratio] * 3, "held": 0.5, "seeds": 2}
        for arm, ratio in over_base.items()
    }
    named = {"workload": "w", "pool": "small", "load": load, "rate": 0.1}
    return {**named, "caveat": "", "base": next(iter(arms)), "arms": arms}
