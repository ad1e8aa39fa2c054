"""A random engine from a seed: pool sizes down to one request, every mode we claim."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import vllm
from packaging.version import Version

from bench.sim.rivals import published
from bench.stress.wedge import loading
from bench.stress.wedge.loading import Loads
from ttlcache import policies
from ttlcache.config import PROGRAM_ORDERINGS
from ttlcache.policies.adaptive import Adaptive
from ttlcache_connector.plugin import ASYNC_SCHEDULER, SYNC_SCHEDULER
from ttlcache_sim.harness import EngineSpec


class EagerAdaptive(Adaptive):
    """Trusts its history within the few turns of a schedule."""

    MIN_RECORDS = 3


policies.register("adaptive-eager", f"{__name__}:EagerAdaptive")

POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fixed", {"ttl_s": 0.0}),
    ("fixed", {"ttl_s": 3.0}),
    ("fixed", {"ttl_s": 1e6}),
    ("cachettl", {"k": 5}),
    ("adaptive-eager", {}),
    ("ski-rental", {}),
    *((rival.name, {}) for rival in published.POLICIES),
)


#: Of the harness's KV, in one group.
BYTES_PER_TOKEN = 256


@dataclass(frozen=True)
class RandomEngine:
    """An engine spec and how its steps are driven.

    depth: steps in flight at once (2 and more: async scheduling, pipeline stages).
    drafts: speculative tokens proposed per step, 0 for none.
    worker_faults: the worker sometimes reports blocks that it could not fill.
    max_programs: programs remembered at once; None for the default.
    """

    engine: EngineSpec
    depth: int = 1
    drafts: int = 0
    worker_faults: bool = False
    loads: Loads | None = None
    max_programs: int | None = None
    has_cpu_tier: bool = False

    @property
    def block_tokens(self) -> int:
        return self.engine.block_tokens

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the largest request that vLLM alone could run here."""
        engine = self.engine
        groups = 1 + (engine.sliding_window is not None)
        groups += engine.mamba_mode is not None
        blocks = (self.engine.num_blocks - 1) // groups
        return max(0, blocks * self.block_tokens - self.drafts - 2)

    @property
    def has_lora(self) -> bool:
        return "enable_lora" in self.engine.engine_args


def random_engine(rng: random.Random, *, load_share: float = 0.35) -> RandomEngine:
    """Draw an engine; everything depends on the arguments only.

    load_share: of the engines that vLLM can load KV into, how many do.
    """
    asynchronous = rng.random() < 0.4
    block_tokens = rng.choice((8, 16))
    queue_policy = rng.choice(("fcfs", "fcfs", "fcfs", "priority"))
    engine = EngineSpec(
        num_blocks=rng.choice((6, 9, 14, 20, 33, 60)),
        block_tokens=block_tokens,
        max_num_seqs=rng.choice((1, 2, 4, 8)),
        max_num_batched_tokens=rng.choice((32, 64, 256)),
        max_model_len=2048,
        async_scheduling=asynchronous,
        sliding_window=rng.choice((None, None, None, 2 * block_tokens)),
        mamba_mode=_mamba_mode(rng),
        policy=queue_policy,
        scheduler_cls=plain_scheduler(asynchronous) if rng.random() < 0.1 else None,
        extra_config=_extra_config(rng, queue_policy),
    )
    config = dict(engine.extra_config)
    max_programs = config.pop("max_programs")  # of the program table, no key
    engine = replace(engine, extra_config=config)
    drafts = 0
    hybrid = engine.sliding_window is not None or engine.mamba_mode is not None
    if rng.random() < 0.15 and engine.mamba_mode is None:
        drafts = rng.choice((1, 3))
        engine = _with_drafts(engine, drafts)
    depth = 2 if asynchronous else rng.choice((1, 1, 1, 2, 3))
    # With several steps in flight vLLM's own scheduler asserts that no more than
    # max_loras run, after admitting one while another skipped a step.
    if not drafts and depth == 1 and rng.random() < 0.2:
        lora = {"enable_lora": True, "max_loras": 1}
        engine = replace(engine, engine_args=lora)
    # vLLM reports bad blocks of single-group caches only, and computes them again
    # only with nothing else in flight.
    faults = depth == 1 and not drafts and not hybrid and rng.random() < 0.25
    depth = depth if not drafts else 1 + asynchronous
    # With recurrent states or windows vLLM promises loads fewer blocks than they take,
    # and so wedges by itself; with windows we prevent it.
    plain = engine.scheduler_cls is not None
    if faults or engine.mamba_mode is not None or rng.random() > load_share:
        drawn = RandomEngine(engine, depth, drafts, faults, max_programs=max_programs)
        return drawn if faults or plain else _with_cpu_tier(drawn)
    # A failed load that is tried again may wedge vLLM; our scheduler prevents that.
    may_fail = not plain and not hybrid
    loads = Loads(
        share=rng.choice((0.3, 0.6, 0.9)),
        failing=rng.choice((0.0, 0.0, 0.2)) if may_fail else 0.0,
        pace=rng.choice((0.05, 0.3, 1.0)),
        beside=rng.random() < 0.5,
    )
    if rng.random() < 0.6:
        engine = _cramped(rng, engine)
        loads = replace(loads, share=0.9, pace=0.0)
    return RandomEngine(
        _with_loads(engine, loads),
        depth,
        drafts,
        loads=loads,
        max_programs=max_programs,
    )


def _cramped(rng: random.Random, engine: EngineSpec) -> EngineSpec:
    """Pins that nobody but a stalled engine takes, in a pool that they can fill."""
    extra = {
        "policy": "fixed",
        "policy_options": {"ttl_s": 1e6},
        "max_pinned_fraction": 1.0,
        "max_ttl_s": 1e9,
        "max_queue_wait_s": 1e6,
        "quantum_turns": 10**6,
    }
    return replace(
        engine,
        num_blocks=rng.choice((14, 20, 27)),
        max_num_seqs=rng.choice((4, 8)),
        extra_config={**engine.extra_config, **extra},
    )


def _with_loads(engine: EngineSpec, loads: Loads) -> EngineSpec:
    loading.register()
    if not loads.beside:
        ours = ASYNC_SCHEDULER if engine.async_scheduling else SYNC_SCHEDULER
        return replace(
            engine,
            kv_connector=loading.OURS,
            scheduler_cls=engine.scheduler_cls or ours,
        )
    children = [
        {
            "kv_connector": "TTLConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": dict(engine.extra_config),
        },
        {"kv_connector": loading.BESIDE, "kv_role": "kv_both"},
    ]
    return replace(
        engine, kv_connector="MultiConnector", extra_config={"connectors": children}
    )


def _with_cpu_tier(drawn: RandomEngine) -> RandomEngine:
    """For half of them, drawn apart: the others' seeds mean what they did before."""
    rng = random.Random(repr(drawn))
    if rng.random() < 0.5:
        return drawn
    engine = drawn.engine
    blocks = rng.choice((2, 7, 40)) + 1.5
    tier = {
        "lower_tier": "cpu",
        "cpu_gb": blocks * engine.block_tokens * BYTES_PER_TOKEN / 1e9,
        "demote": rng.choice(("on-pressure", "on-expiry", "write-through")),
    }
    engine = replace(engine, extra_config={**engine.extra_config, **tier})
    return replace(drawn, engine=engine, has_cpu_tier=True)


def _with_drafts(engine: EngineSpec, drafts: int) -> EngineSpec:
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": drafts,
        "prompt_lookup_max": 4,
    }
    # vLLM refuses n-gram drafts together with async scheduling.
    return replace(
        engine,
        async_scheduling=False,
        scheduler_cls=None,
        engine_args={"speculative_config": speculative},
    )


def _mamba_mode(rng: random.Random) -> str | None:
    drawn = rng.choice((None,) * 8 + ("none", "align", "all"))
    # vLLM 0.33 has one mode left beside a prefix cache.
    since_0_33 = Version(vllm.__version__) >= Version("0.33.dev0")
    modes = ("align",) if since_0_33 else ("none", "align", "all")
    return drawn if drawn is None or drawn in modes else modes[0]


def plain_scheduler(asynchronous: bool) -> str:
    """vLLM's own."""
    if asynchronous:
        return "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
    return "vllm.v1.core.sched.scheduler.Scheduler"


#: The default twice.
ORDERINGS = (
    "expected-finish",
    "expected-finish",
    "ttl-aware",
    "program-fcfs",
    "request-fcfs",
)


ADMISSIONS = ("none", "room-to-grow")


def _extra_config(rng: random.Random, queue_policy: str) -> dict[str, Any]:
    policy, options = rng.choice(POLICIES)
    ordering = rng.choice(ORDERINGS)
    by_program = queue_policy == "fcfs" and ordering in PROGRAM_ORDERINGS
    return {
        "policy": policy,
        "policy_options": options,
        "ordering": ordering,
        "admission": rng.choice(ADMISSIONS) if by_program else "none",
        "max_pinned_fraction": rng.choice((1.0, 1.0, 0.5, 0.9)),
        "max_ttl_s": rng.choice((5.0, 300.0, 1e9)),
        "max_queue_wait_s": rng.choice((5.0, 60.0, 1e6)),
        "program_idle_s": rng.choice((20.0, 900.0)),
        "max_programs": rng.choice((2, 10_000)),
        "quantum_turns": rng.choice((1, 4, 32, 10**6)),
    }
