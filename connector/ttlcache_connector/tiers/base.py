"""The contract of a lower tier: where KV goes when it leaves GPU memory.

A tier has two halves, as vLLM's connectors have: one beside the scheduler, which
knows what is where, and one in each worker, which moves bytes. `NoTier` is the
scheduler's half of `lower_tier: none`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from ttlcache.telemetry.metrics import MetricsBuffer

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class TierMetadata(KVConnectorMetadata):
    """What the scheduler's half tells the workers' halves in one step.

    inner: the tier's own orders, None where there are none.
    is_past: what is to be stored was computed in earlier steps: it need not wait for
        this step's forward pass, and who waits for its memory has it a step earlier.
    abandoned: loads that were promised to vLLM but could not be ordered, with the
        blocks that stay empty: the worker reports them as failed.
    """

    inner: Any = None
    is_past: bool = False
    abandoned: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class NameOfBlocks(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler once, before the first step.

    Only where it differs from what both compute: vLLM's MultiConnector passes on the
    word of one connector alone.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """Tokens of a request that came back just now; 0 where that failed."""

    request_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Reload:
    """What it cost; known somewhat later, for the tier tells where they came from.

    tier: None where it did not tell in time.
    """

    tier: str | None
    tokens: int
    seconds: float


class TurnEnd(NamedTuple):
    """What was decided of a turn that ended.

    program: whose it was, by a name that tells nothing of its tenant.
    ttl_s: for how long it is worth GPU memory; None: the program has ended.
    is_final: a client's own wish, which nobody prolongs.
    tool: what runs until the next turn, from coarse to fine; empty: not known.
    """

    request_id: str
    program: str | None = None
    ttl_s: float | None = None
    is_final: bool = False
    tool: tuple[str, ...] = ()


class SchedulerTier(ABC):
    """The half beside the scheduler. Every call is on the scheduler's thread.

    None may block for longer than a few milliseconds, and each may raise: the caller
    counts it and goes on without the tier.
    """

    #: Told the request whose blocks need not be held for its copy any more.
    on_settled: Callable[[str], object] = staticmethod(lambda request_id: None)

    #: Counts up when what went down before need not be there any more: another server
    #: answers, or everything was reset.
    generation = 0

    #: It keeps KV in whole chunks of so many.
    chunk_tokens = 1

    #: Told how a turn's way down ended: "stored", "failed" or "dropped".
    on_demotion: Callable[[str], None] = staticmethod(lambda outcome: None)

    @abstractmethod
    def bind(self, pool: BlockPool) -> None:
        """The block pool exists."""

    def blocks_are_named(self, names: Collection[str]) -> None:  # noqa: B027
        """Workers store under these names, not under what both halves compute.

        One name for each rank that says so; the others store under what is computed.
        """

    @abstractmethod
    def is_up(self) -> bool:
        """Whether the tier answers."""

    @abstractmethod
    def arrive(self, request: Request, *, has_pin: bool) -> None:
        """A request came: promote what it needs while it queues, unless pinned."""

    @abstractmethod
    def match(
        self, request: Request, hit_tokens: int, stored_tokens: float = math.inf
    ) -> tuple[int | None, bool]:
        """Tokens beyond the local hit that can be loaded, and whether to wait.

        None: not known yet, ask again in the next step. Must be idempotent.

        Args:
            stored_tokens: what follows so many of the request's first tokens was never
                stored by anybody, as far as one can tell.
        """

    def was_asked(self, request_id: str) -> bool:
        """Whether `match` has looked below for a waiting request, and found or not."""
        return False

    @abstractmethod
    def allocated(
        self, request: Request, blocks: KVCacheBlocks, loaded_tokens: int
    ) -> None:
        """The request got its blocks, `loaded_tokens` of them to be loaded."""

    @abstractmethod
    def build_metadata(self, output: SchedulerOutput) -> TierMetadata:
        """Orders of this step; called once a step, after all allocations."""

    @abstractmethod
    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """The request ended. What is to be demoted of it is told by `demote`."""

    @abstractmethod
    def worker_output(self, output: KVConnectorOutput) -> list[Loaded]:
        """What the workers report of a step; returns the loads that ended."""

    @abstractmethod
    def reloads(self) -> list[Reload]:
        """What loads cost, as far as it became known since the last call."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether steps are needed although no request is left."""

    @abstractmethod
    def owes(self, request_id: str) -> bool:
        """Whether a finished request has KV that should go down one day."""

    @property
    def takes_tails(self) -> bool:
        """Whether a tail that goes down alone is found without what precedes it."""
        return False

    def has_tail(self, request_id: str) -> bool:
        """Whether the end of a finished request is below, and what is owed is not."""
        return False

    def count_unknown(self, request_id: str, start: int, end: int) -> int:
        """Tokens from `start` to `end`, the turn's last one, that are not below."""
        return 0

    @abstractmethod
    def demote(self, request_id: str, start: int = 0) -> int | None:
        """Copy a finished request's KV down now.

        Args:
            start: only what holds this token and those after it; the rest stays owed.

        Returns:
            The first of these tokens that is not below yet, None if all are. Blocks
            from there on should stay as they are until `on_settled`; where they do
            not, as much as is left is copied.
        """

    @abstractmethod
    def ahead(self, request_id: str) -> None:
        """Copy a finished, pinned request's KV down when nothing else is copied."""

    @abstractmethod
    def promote(self, request_id: str, tokens: Sequence[int], salt: str) -> bool:
        """Bring a context nearer, from disk to CPU memory, if nothing else moves.

        Returns:
            Whether that began; False: ask again later.
        """

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """Nobody will ask for what this finished request has and others have not."""

    @abstractmethod
    def tell(self, turn: TurnEnd) -> None:
        """What was decided of a turn, for a tier that decides by itself, too."""

    @abstractmethod
    def references(self) -> dict[int, int]:
        """References that the tier holds, per block id."""

    @abstractmethod
    def reset(self) -> bool:
        """Drop what the tier holds; whether it did."""

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of everything."""


class NoTier(SchedulerTier):
    """Nothing below the GPU."""

    def bind(self, pool: BlockPool) -> None:
        return

    def is_up(self) -> bool:
        return False

    def arrive(self, request: Request, *, has_pin: bool) -> None:
        return

    def match(
        self, request: Request, hit_tokens: int, stored_tokens: float = math.inf
    ) -> tuple[int | None, bool]:
        return 0, False

    def allocated(
        self, request: Request, blocks: KVCacheBlocks, loaded_tokens: int
    ) -> None:
        return

    def build_metadata(self, output: SchedulerOutput) -> TierMetadata:
        return TierMetadata()

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        return

    def worker_output(self, output: KVConnectorOutput) -> list[Loaded]:
        return []

    def reloads(self) -> list[Reload]:
        return []

    def has_work(self) -> bool:
        return False

    def owes(self, request_id: str) -> bool:
        return False

    def demote(self, request_id: str, start: int = 0) -> int | None:
        return None

    def ahead(self, request_id: str) -> None:
        return

    def promote(self, request_id: str, tokens: Sequence[int], salt: str) -> bool:
        return False

    def forget(self, request_id: str) -> None:
        return

    def tell(self, turn: TurnEnd) -> None:
        return

    def references(self) -> dict[int, int]:
        return {}

    def reset(self) -> bool:
        return True

    def shutdown(self) -> None:
        return


@dataclass
class Transfers:
    """What the worker's half reports after a step: vLLM's own fields.

    invalid_blocks: blocks whose load failed (models with one KV cache group).
    failed: requests whose load failed (models with several).
    """

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)


class WorkerTier(ABC):
    """The half in a worker: moves bytes, never raises into a step, never blocks it."""

    metrics: MetricsBuffer

    @abstractmethod
    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's KV tensors, by layer."""

    def name_of_blocks(self) -> str | None:
        """Under which name it stores, if that is not what both halves compute."""
        return None

    @abstractmethod
    def before_forward(self, metadata: TierMetadata, *, is_alone: bool = True) -> None:
        """A step begins; blocks may be overwritten from now on.

        What is to be copied may begin here, or when `load` and `save` are called.

        Args:
            is_alone: no other connector moves this worker's blocks.
        """

    @abstractmethod
    def load(self, metadata: TierMetadata, forward_context: Any) -> None:
        """Start the loads of this step."""

    @abstractmethod
    def save(self, metadata: TierMetadata) -> None:
        """Start the copies of this step: what the forward pass wrote is ordered."""

    @abstractmethod
    def poll(self, finished_ids: Collection[str]) -> Transfers:
        """What ended since the last call."""

    @abstractmethod
    def report(self) -> Any:
        """What the scheduler's half wants to know, None for nothing."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop all copies."""
