"""`python -m bench profile`: step times of a real server, for the simulator.

Programs of the bench's own agents run on plain vLLM, one at a time and then several,
with a scheduler that writes down each step (`bench.serve.step_log`).
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from bench.compare.agents import AgentOptions
from bench.compare.rounds import turns_shown
from bench.compare.step_fit import fit, fit_request_time, read_steps
from bench.serve import tiny_model
from bench.serve.arms import warm_up
from bench.serve.replay import ReplayOptions, replay
from bench.serve.server import STEP_LOG_SCHEDULER, STEP_LOG_VARIABLE, VLLMServer
from bench.tables import table
from ttlcache.cli.command import option
from ttlcache_sim.load.programs import Program, Turn
from ttlcache_sim.steps.profile import Profile

#: Tools of the measured programs take no longer: their steps are what is wanted.
_GAP_S = 0.1
#: Programs in progress at once, one phase each; the first must be alone.
CROWDS = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class ProfileOptions(AgentOptions):
    """programs: of each phase."""

    programs: int = option(8, "How many agents in each phase.", min=4)
    seed: int = option(1000, "Of programs that no comparison replays.")
    out: Path = Path("out/profile")


def profile(options: ProfileOptions, console: Console) -> None:
    """Measure a server's step times; `bench sim --profile` reads them."""
    found = measure_profile(options, tiny_model.build(options.model), console)
    path = options.out / "profile.json"
    found.write(path)
    print_profile(found, console)
    console.print(f"profile: {path}", soft_wrap=True)


def measure_profile(options: AgentOptions, model: Path, console: Console) -> Profile:
    """Of a plain vLLM server with these options."""
    log = (options.out / "steps.jsonl").absolute()
    server = options.server(None)
    server = replace(
        server,
        extra_args=(*server.extra_args, "--scheduler-cls", STEP_LOG_SCHEDULER),
        extra_env={**server.extra_env, STEP_LOG_VARIABLE: str(log)},
    )
    phases = [_phase(options, crowd) for crowd in CROWDS]
    bounds, alone = [], []
    with VLLMServer(model, server, options.out / "server.log") as running:
        warm_up(running)
        for crowd, programs in zip(CROWDS, phases, strict=True):
            bounds.append(len(read_steps(log)))
            name = f"{crowd} at once"
            with turns_shown(name, programs, console) as on_turn:
                done = replay(
                    running.base_url, programs, ReplayOptions(at_once=crowd), on_turn
                )
            if done.failures:
                raise RuntimeError(f"a request failed: {done.failures[0].reason}")
            if crowd == 1:
                turns = sorted(done.records, key=lambda turn: turn.arrival_s)
                alone = [(t.prompt_tokens, t.departure_s - t.arrival_s) for t in turns]
    steps = read_steps(log)
    request_s = fit_request_time(steps[bounds[0] : bounds[1]], alone)
    return replace(
        fit(steps[bounds[0] :], cpu_name()),
        request_base_s=request_s[0],
        request_token_s=request_s[1],
    )


def cpu_name() -> str:
    """Of this machine, as its kernel tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()


def _phase(options: AgentOptions, crowd: int) -> tuple[Program, ...]:
    """Other programs for each, all there from the start."""
    programs = max(options.programs, crowd)
    own = replace(options, programs=programs, seed=options.seed + crowd, at_once=crowd)
    return tuple(
        replace(program, turns=tuple(map(_hurried, program.turns)))
        for program in own.workload()
    )


def _hurried(turn: Turn) -> Turn:
    return replace(turn, gap_s=min(turn.gap_s, _GAP_S))


def print_profile(found: Profile, console: Console) -> None:
    names = ("a step", "a new token", "a pair", "a token of context")
    values = (found.step_base_s, found.token_s, found.pair_s, found.kv_s)
    rows = [
        [name, f"{1e6 * value:.4g}", f"{1e6 * error:.2g}"]
        for name, value, error in zip(names, values, found.errors, strict=True)
    ]
    console.print(table("microseconds", ("", "fitted", "±"), rows))
    console.print(
        f"{found.steps:,} steps; median error of a held-out step "
        f"{found.held_out_error:.1%}, with a prompt in it "
        f"{found.held_out_prefill_error:.1%}; decode steps that are alike differ by "
        f"{found.like_step_error:.1%}; a request takes "
        f"{1e3 * found.request_base_s:.1f} ms and {1e6 * found.request_token_s:.1f} "
        "µs a prompt token outside of steps",
        soft_wrap=True,
        highlight=False,
    )
