"""The fleet demo: the same agents through a router, one arm a routing policy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.command import one_of, option
from bench.compare.demo import DemoOptions
from bench.compare.fleet import report
from bench.compare.fleet.arms import (
    ARMS,
    REFERENCE,
    ROUND_ROBIN,
    SESSION,
    WITH_TIER,
    FleetResult,
    FleetSetting,
    arm_json,
    run_arm,
)
from bench.compare.rounds import PairedRounds, turns_shown
from bench.serve import tiny_model
from bench.sim.metrics import compare_outputs


@dataclass(frozen=True, slots=True)
class FleetOptions(DemoOptions):
    """Sizes of the demo; the defaults took 16 minutes of CPU time on a busy machine."""

    arms: tuple[str, ...] = option(
        (
            REFERENCE,
            ROUND_ROBIN,
            "cache-aware",
            SESSION,
            ROUND_ROBIN + WITH_TIER,
            SESSION + WITH_TIER,
        ),
        f"Which, comma separated: {', '.join(ARMS)}.",
    )
    programs: int = 8
    rate: float = 1.5
    replicas: int = option(2, "vLLM servers.", min=2)
    blocks: int = option(320, "KV pool of each replica, in blocks.", min=16)
    token_scale: float = 0.06
    gap_cap_s: float = 4.0
    tier_gb: float = option(
        0.5, "GB of the LMCache server that replicas share in +lmcache arms.", min=0.01
    )
    kill_at_turn: int | None = option(
        None,
        "SIGKILL a replica after so many completed turns, in every arm "
        "that has several.",
        min=1,
    )
    out: Path = Path("out/fleet")

    def __post_init__(self) -> None:
        for name in self.arms or ("",):
            one_of("--arms", name, ARMS)

    def setting(self, model: Path) -> FleetSetting:
        return FleetSetting(
            model,
            self.server(None),
            self.replicas,
            self.connector,
            self.tier_gb,
            self.out,
            self.seed,
            self.kill_at_turn,
        )


def fleet(options: FleetOptions, console: Console) -> int:
    """Replicas with TTLConnector behind vllm-router: one arm a routing policy."""
    programs = options.workload()
    options.out.mkdir(parents=True, exist_ok=True)
    setting = options.setting(tiny_model.build(options.model))
    num_turns = sum(len(program.turns) for program in programs)
    console.print(
        f"{len(programs)} programs, {num_turns} turns; {options.replicas} replicas "
        f"with a KV pool of {options.blocks * 32:,} tokens each",
        soft_wrap=True,
    )

    def play(name: str, _: int) -> FleetResult:
        with turns_shown(name, programs, console) as on_turn:
            return run_arm(ARMS[name], setting, programs, on_turn)

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
