"""What is drawn, not served: the synthetic programs as the paper shows its own."""

from __future__ import annotations

import random
import statistics
from itertools import accumulate
from typing import Any

from ttlcache_sim.load.gap_mix import GapMix
from ttlcache_sim.load.shapes import SHAPES
from ttlcache_sim.load.workload import WorkloadSpec, build
from ttlcache_sim.metrics import percentile

Row = dict[str, Any]
#: Steps that enough of the programs make.
_PROGRAMS, _STEPS = 2_000, 10
#: The two most frequent tools of each workload.
_TOOLS = {"swe": ("cd", "cat"), "bfcl": ("search_web", "fetch_url")}
_CALLS = (10, 30, 100, 300, 1000)
_REPEATS = 300


def tokens_left() -> list[Row]:
    """Mean tokens still to come, by steps made, of the programs that go on."""
    rows = []
    for name in _TOOLS:
        programs = build(WorkloadSpec(name, _PROGRAMS, rate=1.0, seed=0)).programs
        for made in range(_STEPS):
            left = [
                sum(t.new_prompt_tokens + t.output_tokens for t in program.turns[made:])
                for program in programs
                if len(program.turns) > made
            ]
            mean = round(statistics.fmean(left))
            rows.append({"x": str(made), "arm": name, "tokens_left": mean})
    return rows


def tool_means() -> list[Row]:
    """Within which share of the truth 95 % of the means of so many calls lie."""
    rows = []
    for workload, names in _TOOLS.items():
        shape = SHAPES[workload]
        mix = GapMix.fit(shape.tool_s, shape.tools)
        for tool, parts in zip(mix.tools, mix.parts, strict=True):
            if tool.name not in names:
                continue
            alone = GapMix((tool,), (parts,))
            sums = [_sums(alone, repeat) for repeat in range(_REPEATS)]
            for calls in _CALLS:
                truth_s = calls * alone.moments.mean
                errors = [abs(own[calls - 1] / truth_s - 1.0) for own in sums]
                error = round(percentile(errors, 95), 3)
                row = {"x": str(calls), "arm": tool.name, "error_95": error}
                rows.append(row)
    return rows


def _sums(tool: GapMix, repeat: int) -> list[float]:
    """Seconds of the first call, the first two, …"""
    rng = random.Random(f"{tool.tools[0].name}/{repeat}")
    return list(accumulate(tool.draw(rng)[1] for _ in range(_CALLS[-1])))
