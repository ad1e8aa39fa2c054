"""TTLConnector: vLLM's hooks, handed on to the role that this process plays."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from ttlcache.config import load_config
from ttlcache.errors import TTLCacheError
from ttlcache.types import Admission, Urgency
from ttlcache_connector.engine import requirements, vllm_internals
from ttlcache_connector.engine.request_view import drop_unfit_args
from ttlcache_connector.log import logger
from ttlcache_connector.role.construct import SchedulerRoleBuilder
from ttlcache_connector.role.metrics import TTLConnectorStats, TTLPromMetrics
from ttlcache_connector.role.scheduling import by_arrival
from ttlcache_connector.role.worker import WorkerRole
from ttlcache_connector.tiers.base import TierFactory, TierMetadata, WorkerTier
from ttlcache_connector.tiers.registry import TIERS

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorWorkerMetadata,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ttlcache_connector.queue import ProgramQueue
    from ttlcache_connector.role.parts import SchedulerRole

Hook = TypeVar("Hook", bound=Callable[..., Any])
log = logger(__name__)


def _of_scheduler(plain: Any = None) -> Callable[[Hook], Hook]:
    """A hook of the scheduler role; without that role it answers `plain`."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def call(self: TTLConnector, *args: Any, **kwargs: Any) -> Any:
            if self.scheduler_role is None:
                return plain
            return hook(self, *args, **kwargs)

        return cast(Hook, call)

    return decorate


class TTLConnector(KVConnectorBase_V1, SupportsHMA):
    """Retains finished turns' KV blocks for a computed time-to-live.

    Attributes:
        scheduler_role: in the engine's process, once vLLM has bound its KV cache
            manager; where that failed, and in workers, None: vLLM serves as without us.
        worker_role: moves nothing but in a worker's process, above a lower tier.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.config = load_config(self._kv_transfer_config.kv_connector_extra_config)
        requirements.check_vllm(allow_untested=self.config.allow_untested_vllm)
        requirements.check_engine(vllm_config)
        tier = TIERS[self.config.lower_tier]
        tier.check(self.config)
        self.scheduler_role: SchedulerRole | None = None
        worker_tier = WorkerTier()
        if role is KVConnectorRole.SCHEDULER:
            self._builder = SchedulerRoleBuilder(
                vllm_config, kv_cache_config, self.config
            )
            vllm_internals.expose_control(_control)
        else:
            worker_tier = tier.worker_half(self.config, vllm_config, kv_cache_config)
        self.worker_role = WorkerRole(
            worker_tier, zeroes_blocks=kv_cache_config.needs_kv_cache_zeroing
        )

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Pins end before a sleep, and our copies use addresses that outlast it."""
        extra = kv_transfer_config.kv_connector_extra_config or {}
        return _lower_tier(extra).may_sleep(extra)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A wish: where the attention backend cannot, vLLM warns and takes its own.

        None beside other connectors: where two ask for different ones vLLM stops.
        """
        additional = vllm_config.additional_config
        if isinstance(additional, dict) and requirements.BESIDE_OTHERS in additional:
            return None
        transfer = vllm_config.kv_transfer_config
        extra = (transfer and transfer.kv_connector_extra_config) or {}
        return _lower_tier(extra).kv_cache_layout(vllm_config.device_config.device_type)

    # --- scheduler role: vLLM's hooks ----------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        try:
            self.scheduler_role = self._builder.bind(kv_cache_manager, self)
        except TTLCacheError:
            raise  # a wrong configuration stops the server at start
        except Exception:
            log.warning("ttlcache: no retention in this server", exc_info=True)

    def on_new_request(self, request: Request) -> None:
        if self.scheduler_role is None:
            drop_unfit_args(request)  # no worker could take them
        else:
            self.scheduler_role.requests.on_arrival(request)

    @_of_scheduler(plain=(0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._bound.scheduling.holds_back(self, request, num_computed_tokens):
            return None, False  # vLLM goes on with the next of the queue
        return self._bound.requests.match(request, num_computed_tokens)

    @_of_scheduler()
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._bound.requests.update_state_after_alloc(
            request, blocks, num_external_tokens
        )

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        if self.scheduler_role is None:
            return TierMetadata()
        return self.scheduler_role.steps.build_metadata(scheduler_output)

    @_of_scheduler()
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        parts = self._bound.parts
        parts.prefills.on_loaded(connector_output.finished_recving or ())
        if parts.lower.is_configured:
            self._bound.steps.on_worker_output(connector_output)

    @_of_scheduler(plain=False)
    def has_pending_push_work(self) -> bool:
        lower = self._bound.parts.lower
        return lower.call(lower.tier.has_work, False)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_of_scheduler(plain=(False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._bound.requests.on_finished(request, block_ids)
        return False, None

    @_of_scheduler()
    def reset_cache(self) -> bool | None:
        return self._bound.teardown.reset()

    def shutdown(self) -> None:
        if self.scheduler_role is not None:
            self.scheduler_role.teardown.shutdown()
        self.worker_role.shutdown()

    # --- scheduler role: what a scheduler may ask ----------------------------
    #
    # Ours does, and the guard of `allocate_slots` under any scheduler. None of the
    # three raises: with a fault inside they answer as plain vLLM would.

    def priority(self, request: Request) -> tuple[int, ...]:
        """Sort key of a waiting request; smaller is served first.

        To be asked when a request is queued, once `on_new_request` has seen it; keys
        are integers, and all of one length. A key changes when pins end or a quantum
        is used up: a queue that keeps keys learns of it by `attach_scheduler` and
        `refresh_place`, one that asks anew at each step needs neither.
        """
        if self.scheduler_role is None:
            return by_arrival(request, self._builder.engine.user_priority(request))
        return self.scheduler_role.scheduling.priority(request)

    @_of_scheduler(plain=Admission.ADMIT)
    def admission(self, request: Request, needed_blocks: int) -> Admission:
        """Whether a waiting request may take memory now; changes nothing.

        WAIT: what is free is left to programs under way, which will grow. To be asked
        for the head of a queue in the order of `priority`, before its blocks are
        allocated, while another request runs. With none running nothing may wait.

        Args:
            needed_blocks: KV blocks for all its tokens, beside those found cached.
        """
        return self._bound.scheduling.admission(request, needed_blocks)

    @_of_scheduler(plain=0)
    def eviction(self, needed_blocks: int, request: Request, urgency: Urgency) -> int:
        """Free blocks from pins for a request that lacks them.

        To be asked after a failed allocation, or with `Urgency.HELD_BACK` after
        `admission` said WAIT; then ask that again. No block of a request is touched.

        Args:
            needed_blocks: free KV blocks that it lacks; with `HELD_BACK` all that it
                needs, as `admission` was asked.
            urgency: decides which pins may be taken.

        Returns:
            Blocks that became free, fewer or more than asked for. 0: do not try again
            in this step; nothing more may be taken, or copies under way will give it.
        """
        return self._bound.scheduling.eviction(needed_blocks, request, urgency)

    # --- scheduler role: what our scheduler tells ----------------------------

    @_of_scheduler()
    def attach_scheduler(self, scheduler: Scheduler, queue: ProgramQueue) -> None:
        self._bound.parts.engine.attach(scheduler, queue)
        self._bound.status.log_start(type(scheduler).__name__)

    @_of_scheduler(plain=False)
    def may_free_at_once(self) -> bool:
        """Whether no load can be overwritten by a step in flight."""
        lower = self._bound.parts.lower
        return lower.tier.loads_wait_for_steps or not lower.is_configured

    @_of_scheduler()
    def before_step(self) -> None:
        self._bound.steps.before_step()

    @_of_scheduler()
    def after_step(self, scheduler_output: SchedulerOutput) -> None:
        self._bound.steps.on_step_end(scheduler_output)

    @_of_scheduler()
    def on_paused(self, paused_s: float, *, all_stood: bool) -> None:
        """For so long no request started, and if all stood none ran."""
        self._bound.steps.on_paused(paused_s, all_stood=all_stood)

    @_of_scheduler(plain=False)
    def is_newcomer(self, request: Request) -> bool:
        """Whether a waiting request is of a program that has not started."""
        return self._bound.scheduling.is_newcomer(request)

    @_of_scheduler(plain=False)
    def refresh_place(self, request: Request) -> bool:
        """Whether the place of a waiting request is out of date."""
        return self._bound.scheduling.refresh_place(request)

    @_of_scheduler()
    def queued_s(self, request: Request) -> float | None:
        """When a waiting request arrived, on the monotonic clock; None: not known."""
        return self._bound.scheduling.queued_s(request)

    @_of_scheduler(plain=math.inf)
    def max_wait_s(self, newcomers: int = 0) -> float:
        """Seconds after which a waiting request goes first, whatever the order.

        newcomers: that wait, if the request is one of them.
        """
        return self._bound.scheduling.max_wait_s(newcomers)

    @_of_scheduler()
    def on_overdue(self) -> None:
        self._bound.scheduling.on_overdue()

    @_of_scheduler(plain=0.0)
    def retained_share(self) -> float:
        """Share of the KV blocks that are held for turns to come alone, 0 while a
        request waits for memory: plain vLLM has them free."""
        return self._bound.scheduling.retained_share()

    # --- scheduler role: clients of the API server ----------------------------

    @_of_scheduler(plain={})
    def control(self, order: dict[str, Any]) -> dict[str, Any]:
        """A program's end or progress, or a question; see `ttlcache.control`."""
        return self._bound.status.control(order)

    # --- metrics -------------------------------------------------------------

    def get_kv_connector_stats(self) -> TTLConnectorStats | None:
        if self.scheduler_role is None:
            return self.worker_role.take_stats()
        if self.scheduler_role.parts.engine.scheduler is None:
            self.scheduler_role.steps.on_step_end()  # vLLM asks at the end of each
        return self.scheduler_role.status.take_stats()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> TTLConnectorStats:
        return TTLConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TTLPromMetrics:
        return TTLPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    # --- worker role ---------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_role.tier.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # Before the forward pass, in every step: copies begin here.
        is_alone = not has_kv_transfer_group() or get_kv_transfer_group() is self
        self.worker_role.before_forward(kv_connector_metadata, is_alone=is_alone)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self.has_connector_metadata():
            self.worker_role.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        if self.has_connector_metadata():
            self.worker_role.save(self._get_connector_metadata())

    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        ended = self.worker_role.poll(finished_req_ids)
        return KVConnectorTransferResults(
            finished_recving=ended.received, failed_recving=ended.failed
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_role.report()

    # --- inside --------------------------------------------------------------

    @property
    def _bound(self) -> SchedulerRole:
        assert self.scheduler_role is not None  # see `_of_scheduler`
        return self.scheduler_role


def _lower_tier(extra_config: Mapping[str, Any]) -> TierFactory:
    """What is no tier is refused with its reason when the settings are read."""
    return TIERS.get(str(extra_config.get("lower_tier")), TierFactory())


def find_connector(connector: Any) -> TTLConnector | None:
    """Our connector: the given one, or a child of a MultiConnector."""
    if isinstance(connector, TTLConnector):
        return connector
    for child in getattr(connector, "_connectors", ()):
        if isinstance(child, TTLConnector):
            return child
    return None


def _control(scheduler: Scheduler, order: dict[str, Any]) -> dict[str, Any]:
    """The answer to an order of the API server; empty without our connector."""
    connector = find_connector(scheduler.connector)
    return {} if connector is None else connector.control(order)
