"""The fleet demo: the same agents through a router, one arm a routing policy."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from bench.compare.fleet import report
from bench.compare.fleet.arms import (
    ARMS,
    FleetOptions,
    FleetResult,
    arm_json,
    run_arm,
)
from bench.compare.rounds import PairedRounds, turns_shown
from bench.serve import tiny_model
from bench.sim.metrics import compare_outputs


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

    rounds = PairedRounds(options.out, asdict(options), console, _results)
    (done,) = rounds.play(options.arms, 1, play)
    results = list(done.values())
    console.print(report.arms_table(results))
    for line in report.deaths(results):
        console.print(line, soft_wrap=True)
    return rounds.status()


def _results(done: list[dict[str, FleetResult]]) -> tuple[dict[str, Any], list[str]]:
    """Of the arms so far; outputs are compared with the first one's."""
    arms = list(done[0].values())
    outputs = {r.name: compare_outputs(arms[0].records, r.records) for r in arms}
    found = {
        r.name: {
            **arm_json(r),
            "tokens_identical": outputs[r.name].tokens_identical,
            "first_token_logprob_max_diff": outputs[
                r.name
            ].first_token_logprob_max_diff,
            "migration": report.migration(r),
        }
        for r in arms
    }
    problems = [p for r in arms for p in report.problems(r, outputs[r.name])]
    return {"arms": found}, problems
