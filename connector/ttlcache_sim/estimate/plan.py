"""What is simulated: the engine, the loads, and vLLM with and without ttlcache."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ttlcache.cli.command import argument, option
from ttlcache_sim.arm import Arm
from ttlcache_sim.estimate.sessions import Sessions
from ttlcache_sim.load.workload import WorkloadSpec
from ttlcache_sim.settings import Cell, EngineSetting
from ttlcache_sim.steps.hardware import HARDWARE
from ttlcache_sim.steps.models import BYTES_PER_NUMBER, MODELS
from ttlcache_sim.steps.profile import load_profile

ARMS = (Arm("vLLM", "alone"), Arm("ttlcache", "its defaults", {}))
SEEDS = (0, 1)
_CAPACITY_SEED = 1000
#: Loads: shares of the capacity, or of the rate that is given.
LOADS = (0.5, 0.8, 1.1)
_RATE_LOADS = (0.5, 1.0, 1.5)
#: Of the programs of a run, so many first and last ones are not counted.
_WARM_UP, _DRAIN = 0.2, 0.14
#: Turns of a run: what two cores simulate of all runs in so many minutes; where fewer
#: programs do not fill the pool it may last so many times as long.
MAX_TURNS, _MINUTES, _PATIENCE = 1500, 2, 3
MIN_PROGRAMS, _MOST_PROGRAMS = 12, 120
#: Programs at once that show the capacity, in final contexts of the pool; a run has
#: three times as many: they warm up, are counted, and drain.
_CROWD, _PHASES = 4, 3
#: vLLM's block, in which `--blocks` counts, and a larger one, three times as cheap.
VLLM_BLOCK_TOKENS, _BLOCK_TOKENS = 16, 64
#: Of a GPU: GB, and vLLM's defaults for a step and for running requests.
_GPUS = {
    "a100-80": (80.0, 2048, 256),
    "h100": (80.0, 8192, 1024),
    "h200": (141.0, 8192, 1024),
    "b200": (180.0, 16384, 1024),
}
#: Of host memory, a GPU: ttlcache's default where the host has enough.
_CPU_GB = 16
#: Share of the memory that vLLM takes, and GB of it for activations and graphs.
_UTILIZATION, _ACTIVATIONS_GB = 0.92, 3.0


@dataclass(frozen=True, slots=True)
class EstimateOptions:
    """Whose sessions, and the server that they would have."""

    paths: list[Path] = argument("Logs: files, or folders.")
    model: str = option("llama-3.1-8b", f"One of {', '.join(MODELS)}.")
    gpu: str = option("a100-80", f"One of {', '.join(HARDWARE)}.")
    profile: Path | None = option(None, "Measured step times, in place of a roofline.")
    blocks: int = option(0, "KV pool in vLLM's blocks; 0: what the GPU has.", min=0)
    gpu_gb: float = option(0.0, "GB of a GPU; 0: as it is sold.", min=0, max=1e4)
    rate: float = option(
        0.0, "Programs a second; 0: shares of the capacity.", min=0, max=1e6
    )
    programs: int = option(
        0,
        f"Programs of a run, {MIN_PROGRAMS} at least; 0: as many as run in two to six "
        "minutes.",
        min=0,
    )
    out: Path = option(Path("out/estimate"), "Folder of the picture and the numbers.")


@dataclass(frozen=True, slots=True)
class Plan:
    """engine, spec: of every run; the rate and the seed of `spec` are to be set."""

    engine: EngineSetting
    spec: WorkloadSpec

    @property
    def host_gb(self) -> int:
        """Of ttlcache's CPU tier, which it has by default on GPUs."""
        return _CPU_GB * MODELS[self.engine.model].tp

    @property
    def counted(self) -> int:
        """Programs of a run that are counted."""
        return self.spec.programs - self.spec.warm_up - self.spec.drain

    def why_no_estimate(self, sessions: Sessions) -> str:
        """Why the runs would say nothing of these programs; empty where they do."""
        mean_tokens = sessions.mean_context_tokens(self.spec.max_context)
        if self.crowd(mean_tokens) * mean_tokens >= self.engine.pool_tokens:
            return ""
        needed = _to_fill(self.engine, sessions)
        minutes = _MINUTES * needed * sessions.mean_turns / MAX_TURNS
        return (
            f"no estimate: {self.spec.programs} programs do not fill the pool; try "
            f"--programs {needed}, about {minutes:.0f} minutes"
        )

    def crowd(self, mean_context_tokens: float) -> int:
        """Programs at once of `capacity_cells`."""
        contexts = self.engine.pool_tokens / mean_context_tokens
        return max(1, min(round(_CROWD * contexts), self.spec.programs // _PHASES))

    def capacity_cells(self, mean_context_tokens: float) -> list[Cell]:
        """A new program whenever one ends: what each arm completes a second."""
        crowd = self.crowd(mean_context_tokens)
        spec = replace(
            self.spec,
            seed=_CAPACITY_SEED,
            arrivals=f"closed:{crowd}",
            warm_up=crowd,
            drain=crowd,
        )
        return [self._cell(arm, spec) for arm in ARMS]

    def cells(self, rates: Sequence[float]) -> list[Cell]:
        """Loads x arms x seeds."""
        return [
            self._cell(arm, replace(self.spec, rate=rate, seed=seed))
            for rate in rates
            for arm in ARMS
            for seed in SEEDS
        ]

    def _cell(self, arm: Arm, spec: WorkloadSpec) -> Cell:
        below = f"cpu:{self.host_gb}"
        engine = replace(self.engine, offload=below) if arm.extra is not None else None
        return Cell(arm, engine or self.engine, spec)


def plan_of(options: EstimateOptions, sessions: Sessions, trace: Path) -> Plan:
    """
    Raises:
        ValueError: an unknown name, or memory that holds no model or no session.
    """
    _check("model", options.model, MODELS)
    _check("gpu", options.gpu, _GPUS)
    _, step_tokens, max_num_seqs = _GPUS[options.gpu]
    engine = EngineSetting(
        hardware=options.gpu,
        model=options.model,
        blocks=_pool_tokens(options) // _BLOCK_TOKENS + 1,
        block_size=_BLOCK_TOKENS,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=step_tokens,
        tell_last=False,
        profile=options.profile,
    )
    if options.profile is not None:
        load_profile(options.profile)  # told before all else
    if sessions.shortest_context_tokens > engine.max_context:
        raise ValueError(
            f"{engine.max_context:,} tokens (the pool, or the model's longest context) "
            f"hold no session: the shortest has {sessions.shortest_context_tokens:,}"
        )
    affordable = max(MIN_PROGRAMS, round(MAX_TURNS / sessions.mean_turns))
    needed = min(_to_fill(engine, sessions), _PATIENCE * affordable)
    by_default = max(needed, min(_MOST_PROGRAMS, affordable))
    programs = max(options.programs or by_default, MIN_PROGRAMS)
    warm_up, drain = (math.ceil(share * programs) for share in (_WARM_UP, _DRAIN))
    spec = WorkloadSpec(
        f"trace:{trace}",
        programs,
        rate=1.0,
        seed=0,
        max_context=engine.max_context,
        warm_up=warm_up,
        drain=drain,
    )
    return Plan(engine, spec)


def _to_fill(engine: EngineSetting, sessions: Sessions) -> int:
    """Programs of a run of which those at once fill the pool."""
    mean_tokens = sessions.mean_context_tokens(engine.max_context)
    return math.ceil(engine.pool_tokens / mean_tokens) * _PHASES


def rates_of(options: EstimateOptions, capacity: float) -> list[float]:
    """Programs a second, of four digits: one that can be typed gives the same."""
    loads, unit = (_RATE_LOADS, options.rate) if options.rate else (LOADS, capacity)
    return [float(f"{load * unit:.4g}") for load in loads]


def _pool_tokens(options: EstimateOptions) -> int:
    if options.blocks:
        return options.blocks * VLLM_BLOCK_TOKENS
    model = MODELS[options.model]
    gb = options.gpu_gb or _GPUS[options.gpu][0]
    pool_bytes = (_UTILIZATION * gb - _ACTIVATIONS_GB) * 1e9 * model.tp
    pool_bytes -= model.params * BYTES_PER_NUMBER
    if pool_bytes <= 0:
        gpus = "a GPU" if model.tp == 1 else f"{model.tp} GPUs"
        raise ValueError(f"{model.name} does not fit into {gb:g} GB of {gpus}")
    return int(pool_bytes / model.kv_bytes_per_token)


def _check(what: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(f"{what} {value!r}: expected one of {', '.join(known)}")
