"""The arms of the fleet demo, and what one of them measures."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from bench.command import one_of
from bench.compare.agents import ComparisonOptions
from bench.compare.fleet.cluster import Cluster, started
from bench.compare.fleet.front import Front
from bench.compare.fleet.router import Router
from bench.serve.arms import EngineCounters, read_engine, warm_up
from bench.serve.replay import Failure, ReplayOptions, replay
from ttlcache.cli.command import option
from ttlcache_sim.load.programs import Program
from ttlcache_sim.metrics import Summary, TurnRecord, by_program, summarize

#: As many as the OpenAI client makes after a few more failures than usual: a replica
#: that is killed is answered for within seconds.
RETRIES = 6


@dataclass(frozen=True, slots=True)
class FleetArm:
    """How requests reach the replicas.

    policy: vllm-router's `--policy`; None: one replica, and no router.
    session: clients send `X-Session-ID`.
    front: clients send no id at all, `ttlcache front` finds one.
    tier: the replicas share one LMCache server.
    """

    name: str
    policy: str | None
    session: bool = False
    front: bool = False
    tier: bool = False


REFERENCE = "single"
ROUND_ROBIN = "round-robin"
SESSION = "session"
#: Appended to an arm's name where the replicas share a lower tier.
WITH_TIER = "+lmcache"
_ROUTINGS = (
    FleetArm(REFERENCE, None),
    FleetArm(ROUND_ROBIN, "round_robin"),
    FleetArm("cache-aware", "cache_aware"),
    FleetArm(SESSION, "consistent_hash", session=True),
    FleetArm("sticky", "sticky_least_loaded", session=True),
    FleetArm("front", "consistent_hash", front=True),
)
ARMS = {
    **{arm.name: arm for arm in _ROUTINGS},
    **{
        arm.name + WITH_TIER: replace(arm, name=arm.name + WITH_TIER, tier=True)
        for arm in _ROUTINGS
    },
}


@dataclass(frozen=True, slots=True)
class FleetOptions(ComparisonOptions):
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


@dataclass(frozen=True, slots=True)
class Death:
    """A replica that was killed mid-run."""

    server: str
    at_s: float
    """Departure of the turn after which it was, since the replay's start."""


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Everything measured in one arm."""

    name: str
    records: tuple[TurnRecord, ...]
    failures: tuple[Failure, ...]
    retried: tuple[Failure, ...]
    log_errors: tuple[str, ...]
    summary: Summary
    engines: tuple[EngineCounters, ...]
    """Of the replicas that lived to the end."""
    death: Death | None = None

    @property
    def gpu_hit(self) -> float:
        """Prompt tokens found in GPU memory / all prompt tokens."""
        return sum(e.prefix_cache_hits for e in self.engines) / self._queries

    @property
    def reloaded(self) -> float:
        """Prompt tokens that came from the shared tier / all prompt tokens."""
        return sum(e.lower_tier_hits for e in self.engines) / self._queries

    @property
    def stayed(self) -> float:
        """Share of returning turns that the replica of the turn before served."""
        pairs = [
            before.server == after.server
            for own in by_program(self.records).values()
            for before, after in itertools.pairwise(own)
        ]
        return sum(pairs) / len(pairs) if pairs else 1.0

    @property
    def turns_by_replica(self) -> dict[str, int]:
        return dict(sorted(Counter(record.server for record in self.records).items()))

    @property
    def _queries(self) -> float:
        return sum(e.prefix_cache_queries for e in self.engines)


def run_arm(
    arm: FleetArm,
    options: FleetOptions,
    model: Path,
    programs: Sequence[Program],
    on_turn: Callable[[TurnRecord], None],
) -> FleetResult:
    """Start the arm's replicas and router, replay, stop everything.

    Raises:
        ServerError: something did not start.
        ValueError: not one turn was completed.
    """
    folder = options.out / arm.name
    how = ReplayOptions(
        seed=options.seed,
        hints=not arm.front,
        session_header=arm.session,
        retries=RETRIES,
    )
    replicas = 1 if arm.policy is None else options.replicas
    # Whatever replica a program comes back to finds its KV below: each chunk is copied
    # as soon as it is computed, so that a dead replica takes nothing along.
    below = {"demote": "write-through"} if arm.tier else {}
    starting = started(
        model,
        options.server(None),
        replicas,
        {**below, **options.connector},
        options.tier_gb if arm.tier else None,
        folder,
    )
    with ExitStack() as stack:
        cluster = stack.enter_context(starting)
        base_url = _entry(stack, arm, cluster, folder)
        for server in cluster.replicas:
            warm_up(server)
        before = [server.metrics() for server in cluster.replicas]
        killer = _Killer(cluster, None if replicas == 1 else options.kill_at_turn)

        def seen(record: TurnRecord) -> None:
            killer.see(record)
            on_turn(record)

        result = replay(base_url, programs, how, seen)
        engines = tuple(
            read_engine(server, before[index])
            for index, server in enumerate(cluster.replicas)
            if index not in cluster.killed
        )
    if not result.records:
        raise ValueError(f"every program failed, e.g. {result.failures[0]}")
    errors = tuple(e for server in cluster.living for e in server.errors_in_log())
    return FleetResult(
        arm.name,
        result.records,
        result.failures,
        result.retried,
        errors,
        summarize(result.records),
        engines,
        killer.death,
    )


def _entry(stack: ExitStack, arm: FleetArm, cluster: Cluster, folder: Path) -> str:
    """What clients talk to."""
    if arm.policy is None:
        return cluster.urls[0]
    router = Router(cluster.urls, arm.policy, folder / "router.log")
    stack.enter_context(router)
    if not arm.front:
        return router.base_url
    front = Front(router.base_url, folder / "front.log")
    return stack.enter_context(front).base_url


class _Killer:
    """Kills the replica that gave the n-th answer."""

    def __init__(self, cluster: Cluster, at_turn: int | None) -> None:
        self._cluster = cluster
        self._at_turn = at_turn
        self._turns = 0
        self.death: Death | None = None

    def see(self, record: TurnRecord) -> None:
        self._turns += 1
        if self._turns == self._at_turn:
            self.death = Death(record.server, record.departure_s)
            self._cluster.kill(int(record.server.removeprefix("replica-")))
