"""The contract of a lower tier: where KV goes when it leaves GPU memory.

A tier has two halves, as vLLM's connectors have: one beside the scheduler, which
knows what is where, and one in each worker, which moves bytes.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ttlcache.config import TTLCacheConfig
from ttlcache.programs.model import Program, RequestRecord
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.types import UNKNOWN_GAP, Decision

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

#: Programs that only we tell apart are numbered, in every engine from 0.
_ENGINE_ID = uuid.uuid4().hex


@dataclass
class TierMetadata(KVConnectorMetadata):
    """The scheduler tier's orders of one step for the worker tiers.

    inner: the tier's own orders, None where there are none.
    stores_before_forward: their KV was written in an earlier step, so that they may
        start before the forward pass; this frees their blocks one step sooner.
    abandoned: requests whose load was promised to vLLM but could not be ordered: the
        worker reports it as failed.
    """

    inner: Any = None
    stores_before_forward: bool = False
    abandoned: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Match:
    """What the tier found of a waiting request.

    tokens: beyond the local hit, that can be loaded, for which the request waits; None:
        not known yet, ask again in the next step.
    is_answered: what the tier has of it, maybe nothing, is known.
    """

    tokens: int | None = 0
    is_answered: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """Tokens of a request that came back just now, and what that took.

    tokens: 0 where it failed.
    """

    request_id: str
    tokens: int
    seconds: float = 0.0


@dataclass(slots=True)
class TierEvents:
    """What happened since the last call.

    loaded: loads that ended.
    demotions: how they ended: "stored", "failed", or "dropped" in part or whole.
    releasable: finished requests whose blocks need not be held for their copy any more:
        the tier has references of its own on what it copies, or does not want it.
    """

    loaded: list[Loaded] = field(default_factory=list)
    demotions: list[str] = field(default_factory=list)
    releasable: list[str] = field(default_factory=list)


class Fill(NamedTuple):
    """How full a tier is, on all ranks; 0 of 0 where another process knows."""

    used_bytes: int = 0
    budget_bytes: int = 0


class TurnEnd(NamedTuple):
    """What a tier that decides by itself may know of a turn that ended.

    program: whose it was, by a name that does not reveal its tenant.
    ttl_s: for how long it is worth GPU memory; None: the program has ended.
    is_final: the client set the TTL: it holds for the tier, too.
    tool: what runs until the next turn, from coarse to fine; empty: not known.
    """

    request_id: str
    program: str | None = None
    ttl_s: float | None = None
    is_final: bool = False
    tool: tuple[str, ...] = ()


def turn_end(
    request_id: str, record: RequestRecord, decision: Decision | None
) -> TurnEnd:
    """What a tier may know of a finished request's turn.

    decision: None where nothing was decided, as while retention is off.
    """
    program = record.program
    name = program_name(program)
    if program.ended:
        return TurnEnd(request_id, name)
    if decision is None:
        return TurnEnd(request_id, name, 0.0)
    key = program.awaited_turns[-1].gap_key if program.awaited_turns else UNKNOWN_GAP
    tool = () if key == UNKNOWN_GAP else tuple(part for part in key if part)
    return TurnEnd(request_id, name, decision.ttl_s, decision.reason == "client", tool)


def program_name(program: Program) -> str:
    """The same for the same client's program on every engine; hides the tenant."""
    key = program.key
    text = f"{_ENGINE_ID}/{key}" if isinstance(key, int) else repr(key)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


class TierDemotions:
    """What becomes of finished requests; here: nothing of them is kept."""

    def on_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """The request ended. What is to be demoted of it follows by `demote`."""

    def can_be_demoted(self, request_id: str) -> bool:
        """Whether a finished request has KV whose copy down is not ordered yet."""
        return False

    def demote(self, request_id: str) -> bool:
        """Copy a finished request's KV down now.

        Returns:
            Whether there is something to copy. Its blocks should stay as they are until
            it is in `TierEvents.releasable`; where they do not, what is left is copied.
        """
        return False

    def drop(self, request_id: str) -> None:
        """This finished request will not be continued.

        Its chunks that are not stored yet are dropped; chunks that other requests
        offered, too, stay queued.
        """

    def drop_copies(self, needed_blocks: int | None = None) -> int:
        """Give up copies under way: nobody wants them, or their memory is needed.

        Blocks that they only read are not held from now on, if the tier can help it.

        Args:
            needed_blocks: the newest copies, until so many are free; None: all.

        Returns:
            Blocks that became free.
        """
        return 0

    def report_turn(self, turn: TurnEnd) -> None:
        """What was decided of a turn, for a tier that decides by itself, too."""

    def references(self) -> dict[int, int]:
        """References that the tier holds, per block id."""
        return {}


class SchedulerTier:
    """The half beside the scheduler. Every call is on the scheduler's thread.

    As it is here it keeps nothing: `lower_tier: none`.

    None may block for longer than a few milliseconds, and each may raise: the caller
    counts it and goes on without the tier.
    """

    #: It keeps KV in whole chunks of so many tokens.
    chunk_tokens = 1

    #: A load begins only after the steps in flight: blocks may be freed at once.
    loads_wait_for_steps = False
    #: Other engines use it: a plain reset of the prefix cache leaves it.
    is_shared = False
    #: Too many calls raised: from now on it answers as a tier that is down.
    is_off = False

    #: May be the tier itself.
    demotions: TierDemotions = TierDemotions()

    def bind(self, manager: KVCacheManager) -> None:
        """The KV cache manager exists, and its block pool."""

    def is_up(self) -> bool:
        """Whether the tier answers."""
        return False

    def on_arrival(self, request: Request, *, has_pin: bool) -> None:
        """A request came: look up what it needs while it queues, unless pinned."""

    def match(
        self, request: Request, hit_tokens: int, lookup_limit_tokens: float
    ) -> Match:
        """What can be loaded of a waiting request. Must be idempotent.

        Args:
            hit_tokens: found in GPU memory.
            lookup_limit_tokens: upper bound on the request's tokens that can be stored.
        """
        return Match()

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, external_tokens: int
    ) -> None:
        """The request got its blocks, `external_tokens` of them to be loaded."""

    def build_metadata(self, output: SchedulerOutput) -> TierMetadata:
        """Orders of this step; called once a step, after all allocations."""
        return TierMetadata()

    def abandon(self, request_ids: Collection[str]) -> None:
        """A call raised before these requests' loads could be ordered."""

    def on_worker_output(self, output: KVConnectorOutput) -> None:
        """What the workers report of a step."""

    def take_events(self) -> TierEvents:
        """Asked before a step, after `build_metadata` and after `on_worker_output`."""
        return TierEvents()

    def fill(self) -> Fill:
        return Fill()

    def has_work(self) -> bool:
        """Whether steps are needed although no request is left."""
        return False

    def reset(self) -> bool:
        """Drop what the tier holds; whether it did."""
        return True

    def shutdown(self) -> None:
        """Let go of everything."""


@dataclass
class Transfers:
    """What the worker's half reports after a step: vLLM's own fields.

    failed: requests whose load failed. Not blocks: running requests may share those,
        and vLLM would take back what they have computed.
    """

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerTier:
    """The half in a worker: moves bytes beside the step.

    What it raises `role.worker` counts; it may wait for milliseconds, in `poll`.

    As it is here it moves nothing: `lower_tier: none`.
    """

    def __init__(self) -> None:
        self.metrics = MetricsBuffer()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's KV tensors, by layer."""

    def load(self, metadata: TierMetadata) -> None:
        """Start the loads of this step.

        Before the forward pass where no other connector, and no zeroing of new blocks,
        forbids it (`role.worker`).
        """

    def save(self, metadata: TierMetadata) -> None:
        """Start the copies of this step, unless they were started before its forward
        pass (`stores_before_forward`)."""

    def poll(self, finished_ids: Collection[str]) -> Transfers:
        """What ended since the last call."""
        return Transfers()

    def report(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler's half wants to know, None for nothing."""
        return None

    def shutdown(self) -> None:
        """Stop all copies."""


class TierFactory:
    """A value of `lower_tier`: here "none"."""

    def check(self, config: TTLCacheConfig) -> None:
        """Before any process or weight is loaded.

        Raises:
            ConfigError: what it needs is not installed.
            UnsupportedEngineError: versions that were not tested.
        """

    def may_sleep(self, extra_config: Mapping[str, Any]) -> bool:
        """Whether vLLM's `--enable-sleep-mode` goes with these settings."""
        return True

    def kv_cache_layout(self, device_type: str) -> str | None:
        """vLLM's name of the layout that it copies best; None: any."""
        return None

    def scheduler_half(
        self, config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
    ) -> SchedulerTier:
        """One that keeps nothing where the tier cannot hold this model's KV.

        Raises:
            ConfigError: it cannot be used as configured.
        """
        return SchedulerTier()

    def worker_half(
        self, config: TTLCacheConfig, vllm_config: Any, kv_cache_config: Any
    ) -> WorkerTier:
        """As `scheduler_half`: it moves nothing where that half keeps nothing."""
        return WorkerTier()
