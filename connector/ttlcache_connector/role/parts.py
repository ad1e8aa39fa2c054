"""What the scheduler role is made of: controller, ledger, tier, guards, and who ends
their service."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, cast

from ttlcache.clock import default_clock
from ttlcache.config import TTLCacheConfig, admission_in_force, ordering_in_force
from ttlcache.controller import Controller
from ttlcache.estimators.step_fit import Step
from ttlcache_connector.blocks.demoting import DemotingBlocks
from ttlcache_connector.blocks.failsafe import Pace, drop_orphans
from ttlcache_connector.blocks.lingering import room_blocks
from ttlcache_connector.blocks.pinned import PinnedBlocks
from ttlcache_connector.engine import requirements
from ttlcache_connector.engine.tool_reader import OutputReader
from ttlcache_connector.faults import Faults, guarded
from ttlcache_connector.log import logger
from ttlcache_connector.role.allocation import AllocationGuard, Reclaims, groups_of
from ttlcache_connector.role.divergence_log import DivergenceLog
from ttlcache_connector.role.state_files import HistoryFile, load_costs, open_telemetry
from ttlcache_connector.tiers.factory import scheduler_tier
from ttlcache_connector.tiers.guarded import GuardedTier

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from ttlcache_connector.queue import ProgramQueue

log = logger(__name__)


class SideParts:
    """Builds the parts of one engine's scheduler role, and lets everything go.

    Until `bind` was called there is no pool and nothing is retained.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, config: TTLCacheConfig
    ) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._groups = kv_cache_config.kv_cache_groups
        self._reader = (
            OutputReader(
                vllm_config.model_config,
                config.tool_call_parser,
            )
            if config.reads_outputs
            else None
        )
        self._clock = default_clock()
        self.faults = Faults(self._count_fault, self._turn_off, self._clock.now_s)
        self.lower = GuardedTier(
            scheduler_tier(config, vllm_config, kv_cache_config),
            self.count,
            self._clock.now_s,
        )
        self._costs = load_costs(
            config, vllm_config.scheduler_config.max_num_batched_tokens
        )
        self._history = HistoryFile(config, self._clock.now_s())
        self.controller: Controller | None = None
        self.ledger: PinnedBlocks | None = None
        self._demoting: DemotingBlocks | None = None
        self._scheduler: Scheduler | None = None
        self._queue: ProgramQueue | None = None
        self._heeds_priority = vllm_config.scheduler_config.policy == "priority"
        self._local_hits: dict[str, int] = {}
        self._lower_generation = 0  # as last passed on to the controller
        self._prefilling: dict[str, Request] = {}
        self._arrived: set[str] = set()  # of these, whose remote KV is there
        # Scheduled, results not there: two with async scheduling, a pipeline has more.
        self._steps: deque[tuple[SchedulerOutput, Step]] = deque(maxlen=64)
        self._gauges_sent_s = float("-inf")
        self._pace = Pace()
        self._divergences = DivergenceLog()
        self.announced = False

    def bind(self, pool: BlockPool, manager: KVCacheManager | None) -> None:
        """The pool exists: from now on turns can be retained.

        Without the manager nothing could make pins give way: nothing is retained.
        """
        if manager is None:
            log.warning(
                "ttlcache: this vLLM does not bind its KV cache manager; retention "
                "stays off"
            )
            return
        sizes = [group.block_tokens for group in groups_of(manager)]
        demoting: DemotingBlocks | None = None
        if self.lower.is_set:
            self.lower.tier.bind(pool)
            demoting = DemotingBlocks(
                pool,
                sizes,
                self._queue_counts,
                report_turn=self.lower.report_turn,
                tier=self.lower.tier,
                clock=self._clock,
                room_blocks=self._room_blocks(pool, sizes),
            )
        self._demoting = demoting
        self.ledger = demoting or PinnedBlocks(pool, sizes, self._queue_counts)
        self.controller = Controller(
            self._config,
            self._clock,
            self.ledger,
            block_tokens=pool.hash_block_size,
            gaps=self._history.gaps,
            costs=self._costs,
            on_rekey=self._rekey,
            telemetry=open_telemetry(self._config, self._clock, self._about(pool)),
        )
        # What this class lacks of it, `SchedulerSide` has.
        AllocationGuard(manager, cast(Reclaims, self)).install()

    def attach(self, scheduler: Scheduler, queue: ProgramQueue) -> None:
        """Our own scheduler introduces itself; a foreign one never does."""
        self._scheduler = scheduler
        self._queue = queue

    @property
    def _by_program(self) -> bool:
        """Whether the queue is in our order, not in a foreign scheduler's or by the
        clients' priorities."""
        return self._scheduler is not None and not self._heeds_priority

    def log_start(self, scheduler_name: str, ours: bool) -> None:
        """The one line that says what runs."""
        self.announced = True
        ledger = self.ledger
        log.info(
            "ttlcache %s on vLLM %s: policy=%s%s ordering=%s admission=%s "
            "max_pinned_fraction=%g (%s of %s blocks) max_ttl_s=%g scheduler=%s "
            "kv_groups=%d async_scheduling=%s lower_tier=%s",
            requirements.ttlcache_version(),
            requirements.vllm_version(),
            self._config.policy,
            self._config.policy_options or "",
            ordering_in_force(self._config),
            admission_in_force(self._config) if self._by_program else "none",
            self._config.max_pinned_fraction,
            int(self._config.max_pinned_fraction * ledger.pool_blocks)
            if ledger
            else "?",
            ledger.pool_blocks if ledger else "?",
            self._config.max_ttl_s,
            scheduler_name,
            len(self._groups),
            self._vllm_config.scheduler_config.async_scheduling,
            f"{self._config.lower_tier} demote={self._config.demote}"
            if self.lower.is_set
            else "none",
        )
        if not ours:
            log.warning(
                "ttlcache: scheduler class %s is not ours: turns are pinned and "
                "pins give way under pressure, but programs are not ordered",
                scheduler_name,
            )

    def release_all(self) -> None:
        """Every reference goes, also those that a failing table has lost."""
        self.release_pins()
        self.drop_rest()

    @guarded()
    def release_pins(self) -> None:
        """Every pin that the controller knows."""
        if self.controller is not None:
            self.controller.memory.release_all()
        if self._demoting is not None:
            self._demoting.release_demoting()

    @guarded(fallback=0)
    def drop_rest(self) -> int:
        """Blocks freed by giving back whatever is still referenced, unasked."""
        return 0 if self.ledger is None else self.ledger.drop_all()

    @guarded()
    def release_if_off(self) -> None:
        """Retention is off, but turning off has failed half-way: once more."""
        if self.controller is None or self.controller.retention_enabled:
            return
        if self.controller.pins or (self.ledger is not None and self.ledger.holds_any):
            self._turn_off()

    @guarded(fallback=0)
    def drop_orphans(self) -> int:
        """Blocks freed from pins that a fault has left to the ledger alone."""
        if self.controller is None or self.ledger is None:
            return 0
        return drop_orphans(self.controller, self.ledger)

    def count(self, name: str, label: str = "") -> None:
        if self.controller is not None:
            self.controller.telemetry.metrics.count(name, label)

    def num_running(self) -> int | None:
        """Running requests, None under a foreign scheduler."""
        return None if self._scheduler is None else len(self._scheduler.running)

    def _about(self, pool: BlockPool) -> dict[str, Any]:
        """Head of a recording."""
        return {
            "model": str(getattr(self._vllm_config.model_config, "model", "")),
            "vllm": requirements.vllm_version(),
            "ttlcache": requirements.ttlcache_version(),
            "block_tokens": pool.hash_block_size,
            "pool_blocks": pool.num_gpu_blocks - 1,
        }

    def _queue_counts(self) -> tuple[int, int]:
        scheduler = self._scheduler
        if scheduler is None:
            return 0, 0
        return len(scheduler.running), len(scheduler.waiting)

    def _room_blocks(self, pool: BlockPool, sizes: list[int]) -> int:
        if self._config.demote == "on-expiry":
            return 0
        step_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        return room_blocks(int(pool.num_gpu_blocks) - 1, step_tokens, sizes)

    def _rekey(self, request_id: str) -> None:
        if self._queue is not None:
            self._queue.rekey(request_id)

    def _count_fault(self, hook: str) -> None:
        self.count("hook_errors", hook)

    def _turn_off(self) -> None:
        try:
            if self.controller is not None:
                self.controller.disable()
        finally:
            self.drop_rest()
