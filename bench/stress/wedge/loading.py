"""KV that lies elsewhere: loads that take as long as chance wants, or fail.

`Elsewhere` plays a lower tier or a remote prefill instance. Two connectors ask it: one
of ours that loads by itself, and a stranger beside TTLConnector in a MultiConnector.
`HostCopies` plays workers of our CPU tier.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.tiers.base import TierMetadata
from ttlcache_connector.tiers.cpu.messages import CopyOrders, CopyReport
from ttlcache_sim.idle_connector import IdleConnector, register_connectors

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

OURS = "WedgeLoadingConnector"
BESIDE = "WedgeShelf"


@dataclass
class Plan:
    """What a request finds elsewhere, decided when it first asks."""

    part: float  # of its full blocks, from the first one
    at_once: bool  # loaded within a step, not while others run
    undecided: int  # so many times the answer is "ask again"


@dataclass
class Load:
    """One that is under way. Its blocks are nobody else's until it arrives."""

    request: Request
    block_ids: list[int]


@dataclass(frozen=True)
class Loads:
    """Some requests load their KV from elsewhere, while others run or wait.

    share: of the requests, how many find all full blocks of their context elsewhere.
    failing: share of the loads that end without their KV.
    pace: share of the steps after which loads arrive while others run.
    beside: a stranger loads, in a MultiConnector with TTLConnector.
    """

    share: float
    failing: float
    pace: float
    beside: bool


@dataclass
class Elsewhere:
    """Which requests' KV lies elsewhere, and what of it is on its way.

    moves: how often anything happened here; while it grows, the engine is not stuck.
    """

    rng: random.Random
    block_tokens: int
    loads: Loads
    moves: int = 0
    _plans: dict[str, Plan] = field(default_factory=dict)
    _begun: dict[str, Load] = field(default_factory=dict)
    _launches: deque[dict[str, Load]] = field(default_factory=deque)
    _under_way: dict[str, Load] = field(default_factory=dict)

    @property
    def is_pending(self) -> bool:
        """Whether any load has begun and has not arrived."""
        return bool(self._begun or self._under_way or any(self._launches))

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """`get_num_new_matched_tokens`."""
        plan = self._plans.get(request.request_id)
        if plan is None:
            plan = self._plans[request.request_id] = self._plan()
        if plan.undecided:
            plan.undecided -= 1
            self.moves += 1
            return None, False
        blocks = (request.num_tokens - 1) // self.block_tokens
        there = int(plan.part * blocks) * self.block_tokens
        if there <= computed_tokens:
            return 0, False
        return there - computed_tokens, not plan.at_once

    def allocated(self, request: Request, block_ids: list[int], tokens: int) -> None:
        """`update_state_after_alloc`: a load begins with the step that is scheduled."""
        if not tokens or self._plans[request.request_id].at_once:
            return
        self.moves += 1
        self._begun[request.request_id] = Load(
            request, block_ids[-(tokens // self.block_tokens) :]
        )
        # One that fails or is preempted asks again, and hears something else.
        del self._plans[request.request_id]

    def launch(self) -> None:
        """The worker is told of what began in this step."""
        self._launches.append(self._begun)
        self._begun = {}

    def report(self, *, idle: bool) -> KVConnectorOutput | None:
        """What the worker says after a step; idle: nothing else keeps it busy."""
        self._under_way |= self._launches.popleft()
        if self.rng.random() > (0.5 if idle else self.loads.pace):
            return None
        arrived = [name for name in self._under_way if self.rng.random() < 0.8]
        if not arrived:
            return None
        self.moves += len(arrived)
        output = KVConnectorOutput(finished_recving=set(arrived))
        for name in arrived:
            load = self._under_way.pop(name)
            if self.rng.random() < self.loads.failing:
                self._fail(name, load, output)
        return output

    def _plan(self) -> Plan:
        part = (
            self.rng.choice((1.0, 1.0, 0.7))
            if self.rng.random() < self.loads.share
            else 0
        )
        undecided = self.rng.choice((0, 0, 0, 1, 3))
        return Plan(part, self.rng.random() < 0.15, undecided)

    def _fail(self, name: str, load: Load, output: KVConnectorOutput) -> None:
        # The blocks of an aborted one are nobody's business any more.
        if load.request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            return
        if self.rng.random() < 0.5:
            output.failed_recving.add(name)
        else:
            output.invalid_block_ids.add(self.rng.choice(load.block_ids))


@dataclass
class HostCopies:
    """The worker's half of the CPU tier, without bytes: copies end late, some fail.

    moves: as of `Elsewhere`.
    """

    rng: random.Random
    pace: float
    failing: float
    moves: int = 0
    _under_way: dict[int | str, None] = field(default_factory=dict)
    _awaited: set[str] = field(default_factory=set)  # loads that vLLM waits for

    @property
    def is_pending(self) -> bool:
        return bool(self._under_way)

    def execute(self, metadata: TierMetadata) -> KVConnectorOutput:
        """A step's orders; what the worker reports with its results."""
        orders: CopyOrders = metadata.inner or CopyOrders()
        self._under_way |= dict.fromkeys([*orders.stores, *orders.loads])
        self._awaited |= orders.loads.keys()
        ended = [key for key in self._under_way if self.rng.random() < self.pace]
        report = CopyReport(dict.fromkeys(ended, 1))
        report.failed = {key for key in ended if self.rng.random() < self.failing}
        self.moves += len(ended)
        for key in ended:
            del self._under_way[key]
        received = self._awaited & {*ended, *orders.overdue}
        self._awaited -= received
        output = KVConnectorOutput(finished_recving=received or None)
        output.failed_recving = received - (set(ended) - report.failed)
        output.kv_connector_worker_meta = report
        return output


class _FromElsewhere(KVConnectorBase_V1):
    """Before a connector: it loads, whatever else it does."""

    elsewhere: Elsewhere

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        ask = super().get_num_new_matched_tokens  # type: ignore[safe-super]
        ask(request, num_computed_tokens)
        return self.elsewhere.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tell = super().update_state_after_alloc  # type: ignore[safe-super]
        tell(request, blocks, num_external_tokens)
        block_ids = blocks.get_block_ids()[0]
        self.elsewhere.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        self.elsewhere.launch()
        build = super().build_connector_meta  # type: ignore[safe-super]
        return build(scheduler_output)


class LoadingConnector(_FromElsewhere, TTLConnector):
    """TTLConnector with a lower tier of the bench's."""


class Shelf(_FromElsewhere, IdleConnector):
    """A stranger that keeps KV, as a child of a MultiConnector."""


def register() -> None:
    """Make both known to vLLM."""
    register_connectors(__name__, {OURS: LoadingConnector, BESIDE: Shelf})


def fill(connector: Any, elsewhere: Elsewhere) -> None:
    """Give the engine's connector something to load from."""
    for each in (connector, *getattr(connector, "_connectors", ())):
        if isinstance(each, _FromElsewhere):
            each.elsewhere = elsewhere
