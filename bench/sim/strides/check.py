"""`python -m bench sim --check-strides`: strides against single steps, on six cells."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from bench.sim import run
from bench.sim.load.workload import WorkloadSpec
from bench.sim.rivals.arms import ARMS
from bench.sim.settings import Cell, EngineSetting
from bench.tables import table

#: Largest relative error of the mean JCT.
MAX_ERROR = 0.02
_POOL = EngineSetting(blocks=4_300, block_size=64)
#: Workload, arm, offload: every kind of event that can end a stride.
_CELLS = (
    ("swe", "vllm", "none"),
    ("swe", "cachettl", "none"),
    ("swe", "adaptive", "cpu:20"),
    ("bfcl", "autellix", "none"),
    ("bfcl", "thunderagent", "none"),
    ("openhands", "cachettl", "cpu:20+ssd:200"),
)


def check_strides(console: Console, *, programs: int = 20, processes: int = 2) -> bool:
    """Print both results of every cell; whether all errors are small enough."""
    fine = [_cell(*names, programs, longest=1) for names in _CELLS]
    coarse = [_cell(*names, programs, _POOL.decode_stride) for names in _CELLS]
    results = run.run_cells(
        [*fine, *coarse], processes=processes, cache=None, console=console
    )
    rows, worst = [], 0.0
    for names, one, many in zip(
        _CELLS, results[: len(fine)], results[len(fine) :], strict=True
    ):
        wanted_s, got_s = one.metrics["mean_jct_s"], many.metrics["mean_jct_s"]
        error = abs(got_s / wanted_s - 1)
        worst = max(worst, error)
        cpu = [f"{result.wall['cpu_s']:.1f}" for result in (one, many)]
        numbers = (f"{wanted_s:.3f}", f"{got_s:.3f}", f"{error:.2e}")
        rows.append([" ".join(names), *numbers, *cpu])
    columns = ("cell", "single steps", "strides", "error", "CPU s", "CPU s")
    console.print(table("mean JCT, s", columns, rows, plain=True))
    console.print(f"worst error {worst:.2e}, allowed {MAX_ERROR:g}")
    return worst <= MAX_ERROR


def _cell(workload: str, arm: str, offload: str, programs: int, longest: int) -> Cell:
    engine = replace(_POOL, offload=offload, decode_stride=longest)
    spec = WorkloadSpec(workload, programs, 0.1, 0, max_context=engine.max_context)
    return Cell(ARMS[arm], engine, spec)
