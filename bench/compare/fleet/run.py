"""The fleet demo: the same agents through a router, one arm a routing policy."""

from __future__ import annotations

from rich.console import Console

from bench.compare.fleet import report
from bench.compare.fleet.arms import ARMS, FleetOptions, FleetResult, run_arm
from bench.compare.rounds import play_rounds, turns_shown
from bench.serve import tiny_model


def fleet(options: FleetOptions, console: Console) -> int:
    """Replicas with TTLConnector behind vllm-router: one arm a routing policy."""
    programs = options.workload()
    options.out.mkdir(parents=True, exist_ok=True)
    model = tiny_model.build(options.model)
    num_turns = sum(len(program.turns) for program in programs)
    console.print(
        f"{len(programs)} programs, {num_turns} turns; {options.replicas} replicas "
        f"with a KV pool of {options.blocks * 32:,} tokens each",
        soft_wrap=True,
    )

    def play(name: str, _: int) -> FleetResult:
        with turns_shown(name, programs, console) as on_turn:
            return run_arm(ARMS[name], options, model, programs, on_turn)

    (done,), status = play_rounds(options.arms, options, console, play, report.results)
    results = list(done.values())
    console.print(report.arms_table(results))
    for line in report.deaths(results):
        console.print(line, soft_wrap=True)
    return status
