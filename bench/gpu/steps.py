"""Stage `steps`: a profile of vLLM's steps, beside the simulator's roofline."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from functools import partial

from rich.console import Console

from bench.compare.profile import measure_profile
from bench.gpu.stage import Json, Stage, Verdict
from bench.serve import tiny_model
from bench.sim.hardware import HARDWARE
from bench.sim.models import MODELS
from bench.sim.profile import Profile
from bench.sim.steptime import Roofline
from bench.tables import at_most


def steps(stage: Stage) -> Verdict:
    """Seconds of a step, fitted on the demo's agents; prefills that follow from it."""
    agents = replace(stage.sizes.serve, out=stage.folder / "profile")
    model = tiny_model.build(stage.folder / f"model-{stage.name}", shape=agents.shape)
    console, gpu = Console(file=sys.stderr), stage.machine["gpu"]
    found = Profile.of(
        stage.cell(
            "profile",
            lambda: asdict(
                replace(measure_profile(agents, model, console), machine=gpu)
            ),
        )
    )
    chunk = round(found.largest_sums[0])  # whatever the server's arguments say
    for length in stage.sizes.pin_vs_reload.lengths:
        cell = partial(_prefill, length, chunk, found)
        stage.cell(f"prefill {length}", cell)
    error, limit = found.held_out_error, found.max_held_out_error
    return Verdict(bars=[at_most("median error of a held-out step", error, limit, "")])


def _prefill(tokens: int, chunk: int, found: Profile) -> Json:
    gpu = found.machine.lower()
    names = (name for name in HARDWARE if name.partition("-")[0] in gpu)
    hardware = next(names, "h100")
    roofline = Roofline.of(HARDWARE[hardware], MODELS["llama-3.1-8b"])
    return {
        "tokens": tokens,
        "profile_s": found.prefill_s(tokens, chunk),
        "roofline_s": roofline.prefill_s(tokens, chunk),
        "roofline": f"llama-3.1-8b on {hardware}",
    }
