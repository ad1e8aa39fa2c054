"""The scheduler role of TTLConnector: vLLM's events to the core's controller."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from ttlcache import control
from ttlcache.clock import default_clock, stopwatch_s
from ttlcache.config import TTLCacheConfig
from ttlcache.controller import Controller
from ttlcache.events import Admission, Arrival, Finish, HoldOrder, Urgency
from ttlcache.hints import parse_hints
from ttlcache_connector import compat
from ttlcache_connector.blocks import PinLedger
from ttlcache_connector.demotion import DemotingLedger
from ttlcache_connector.failsafe import (
    MAX_SLOW_IN_A_ROW,
    SLOW_FINISH_S,
    Pace,
    drop_everything,
    drop_orphans,
)
from ttlcache_connector.guard import Faults, guarded
from ttlcache_connector.invariants import violations
from ttlcache_connector.knowledge import HistoryFile, load_costs, open_journal
from ttlcache_connector.pressure import AllocationGuard
from ttlcache_connector.promotion import Promoter
from ttlcache_connector.stats import TTLConnectorStats
from ttlcache_connector.tier_side import TierSide
from ttlcache_connector.tiers import scheduler_tier
from ttlcache_connector.tooltext import OutputReader

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ttlcache_connector.queue import ProgramQueue

log = compat.logger(__name__)

#: Gauges are sent at least this often while the engine steps.
GAUGE_INTERVAL_S = 1.0
#: Events are sent at once when the engine comes to rest, and at most this often while
#: requests run: turns end at nearly every step, and to send costs more than to count.
EVENT_INTERVAL_S = 0.1


class SchedulerSide:
    """Owns the controller and the pin ledger of one engine.

    Every method that vLLM may call is guarded. Until `bind` was called there is
    no pool and nothing is retained.
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
                config.detect_tail_tokens,
                config.tool_call_parser,
            )
            if config.tool_detection
            else None
        )
        self._clock = default_clock()
        self.faults = Faults(
            config.max_hook_faults,
            self._count_fault,
            self._turn_off,
            self._clock.now_s,
        )
        self.lower = TierSide(
            scheduler_tier(config, vllm_config, kv_cache_config),
            config.max_hook_faults,
            self.count,
            self._clock.now_s,
        )
        self._costs = load_costs(config)
        self._history = HistoryFile(config, self._clock.now_s())
        self.controller: Controller | None = None
        self.ledger: PinLedger | None = None
        self._demoting: DemotingLedger | None = None
        self._promoter: Promoter | None = None
        self._scheduler: Scheduler | None = None
        self._queue: ProgramQueue | None = None
        self._heeds_priority = vllm_config.scheduler_config.policy == "priority"
        self._local_hits: dict[str, int] = {}
        self._prefilling: dict[str, Request] = {}
        self._gauges_sent_s = float("-inf")
        self._pace = Pace()
        self.announced = False

    # --- wiring --------------------------------------------------------------

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
        sizes = [group.kv_cache_spec.block_size for group in self._groups]
        demoting: DemotingLedger | None = None
        if self.lower.is_set:
            self.lower.tier.bind(pool)
            demoting = DemotingLedger(
                pool,
                sizes,
                self._queue_counts,
                tier=self.lower.tier,
                clock=self._clock,
                wait_s=self._config.demote_wait_s,
            )
        self._demoting = demoting
        self.ledger = demoting or PinLedger(pool, sizes, self._queue_counts)
        self.controller = Controller(
            self._config,
            self._clock,
            self.ledger,
            block_tokens=pool.hash_block_size,
            gaps=self._history.gaps,
            costs=self._costs,
            on_rekey=self._rekey,
            journal=open_journal(self._config, self._clock, self._about(pool)),
            on_pin_end=demoting.pin_ends if demoting else None,
        )
        if demoting is not None and self._config.promote_ahead:
            self._promoter = promoter = Promoter(self.lower.tier, self.controller)
            demoting.on_turn_end = lambda pin, outcome, request_id: promoter.pin_ended(
                pin, outcome, request_id, self._clock.now_s()
            )
        AllocationGuard(manager, self).install()

    def attach(self, scheduler: Scheduler, queue: ProgramQueue) -> None:
        """Our own scheduler introduces itself; a foreign one never does."""
        self._scheduler = scheduler
        self._queue = queue

    def log_start(self, scheduler_name: str, ours: bool) -> None:
        """The one line that says what runs."""
        self.announced = True
        ledger = self.ledger
        log.info(
            "ttlcache %s on vLLM %s: policy=%s%s ordering=%s max_pinned_fraction=%g "
            "(%s of %s blocks) max_ttl_s=%g scheduler=%s kv_groups=%d "
            "async_scheduling=%s lower_tier=%s",
            compat.ttlcache_version(),
            compat.vllm_version(),
            self._config.policy,
            self._config.policy_options or "",
            self._config.ordering,
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

    # --- events of a request -------------------------------------------------

    @guarded()
    def arrive(self, request: Request) -> None:
        """Idempotent: our scheduler calls it before queueing, vLLM after."""
        controller = self.controller
        if controller is None or request.request_id in controller.requests:
            return
        params = request.sampling_params
        hints = parse_hints(
            request.kv_transfer_params, params.extra_args if params else None
        )
        record = controller.arrive(
            Arrival(
                request_id=request.request_id,
                num_tokens=request.num_tokens,
                hashes=request.block_hashes,
                tokens=_token_slice(request),
                hints=hints,
                tenant=request.cache_salt or "",
                session_id=request.session_id,
                user_priority=self._user_priority(request),
            )
        )
        self.lower.tier_arrive(request, has_pin=record.pin_id is not None)

    def priority(self, request: Request) -> tuple[int, ...]:
        """Sort key of a waiting request (callback of the program queue)."""
        preempted = request.status is RequestStatus.PREEMPTED
        try:
            if self.controller is not None:
                return self.controller.priority(request.request_id, preempted=preempted)
        except KeyError:
            pass  # its arrival failed and was counted: last, in order of time
        except Exception:  # noqa: BLE001 - the serving path fails open
            self.faults.record("priority")
        age = int(request.arrival_time * 1e6)
        return (self._user_priority(request), not preempted, 1, age, 0)

    def admission(self, request: Request, needed_blocks: int) -> Admission:
        """Whether a waiting request may take memory now."""
        if self.controller is None:
            return Admission.ADMIT
        return self.controller.admission(request.request_id, needed_blocks)

    def promote_at_s(self, request: Request) -> float:
        """When the request's anti-starvation rule strikes; never by default."""
        try:
            if self.controller is not None:
                return self.controller.promote_at_s(request.request_id)
        except KeyError:
            pass
        except Exception:  # noqa: BLE001 - the serving path fails open
            self.faults.record("promote_at_s")
        return math.inf

    @guarded()
    def promote(self, request: Request) -> None:
        if self.controller is not None:
            self.controller.promote(request.request_id)

    def stand_back(self, request: Request) -> bool:
        """Whether the head of the queue must be sorted in anew."""
        try:
            if self.controller is not None:
                return self.controller.stand_back(request.request_id)
        except Exception:  # noqa: BLE001 - the serving path fails open
            self.faults.record("stand_back")
        return False

    def eviction(self, needed_blocks: int, request: Request, urgency: Urgency) -> int:
        """Blocks freed from pins, 0 when nothing (more) may be taken."""
        if self.controller is None or self.ledger is None:
            return 0
        if urgency is not Urgency.RUNNING:
            self.ledger.waiting_blocks = needed_blocks
        freed = 0
        if self._demoting is not None:
            running = urgency is Urgency.RUNNING
            freed = self._demoting.relieve(needed_blocks, at_once=running)
            if freed >= needed_blocks:
                return freed
            needed_blocks -= freed
            if not running and self._demoting.soon_free() >= needed_blocks:
                return 0  # a copy of milliseconds against a prefill of seconds
        freed += self.controller.reclaim(needed_blocks, urgency, request.request_id)
        if not freed and urgency is Urgency.STALLED:
            # Nothing runs, nothing frees: what a fault left behind goes, too.
            return drop_orphans(self.controller, self.ledger)
        return freed

    @guarded()
    def note_local_hit(self, request: Request, num_computed_tokens: int) -> None:
        self._local_hits[request.request_id] = num_computed_tokens

    @guarded()
    def admitted(self, request: Request) -> None:
        """The request holds its blocks: claim its pin."""
        request_id = request.request_id
        hit = self._local_hits.pop(request_id, 0)
        if self._queue is not None:
            self._queue.forget(request_id)
        if self.controller is None:
            return
        self.controller.admit(request_id, hit)
        self._prefilling[request_id] = request

    @guarded()
    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """A request ends, its blocks still referenced: pin or let go."""
        started_s = stopwatch_s()
        if self.lower.is_set:
            self.lower.tier_finished(request, block_ids)
        self._local_hits.pop(request.request_id, None)
        self._prefilling.pop(request.request_id, None)
        if self._queue is not None:
            self._queue.forget(request.request_id)
        controller, ledger = self.controller, self.ledger
        if controller is None or ledger is None:
            return
        if request.num_output_tokens:
            controller.prefilled(request.request_id, request.num_prompt_tokens)
        completed = request.status in _COMPLETED and not request.resumable
        candidate = ledger.candidate(block_ids if completed else _no_blocks(block_ids))
        order = controller.finish(
            Finish(
                request_id=request.request_id,
                completed=completed,
                num_tokens=request.num_tokens,
                prompt_tokens=request.num_prompt_tokens,
                hashes=request.block_hashes,
                tokens=_token_slice(request),
                kv_blocks=len(candidate.blocks),
                kv_tokens=candidate.kv_tokens,
                count_unpinned=lambda n: ledger.count_unpinned(candidate.blocks[:n]),
                footprint_blocks=candidate.footprint_blocks,
                divisible=ledger.is_divisible,
                detect=self._detector(request),
            )
        )
        if order is not None:
            ledger.hold(order.pin_id, candidate.blocks[: order.kv_blocks])
        if self._demoting is not None:
            self._let_down(request, candidate.blocks, order)
        took_s = stopwatch_s() - started_s
        controller.metrics.observe("decide_seconds", took_s)
        if controller.retention_enabled and self._pace.is_lost(took_s):
            self.count("hook_errors", "slow")
            log.warning(
                "ttlcache: %d finished turns in a row took more than %g s, retention "
                "is now off for this server",
                MAX_SLOW_IN_A_ROW,
                SLOW_FINISH_S,
            )
            self._turn_off()

    @guarded(fallback={})
    def control(self, order: dict[str, Any]) -> dict[str, Any]:
        """What clients and operators tell and ask, see `ttlcache.control`."""
        if self.controller is None:
            return {}
        self.controller.tick()
        return control.obey(self.controller, order, self._clock.now_s()) | {
            "gauges": self._gauges()
        }

    def _let_down(
        self, request: Request, blocks: list[KVCacheBlock], order: HoldOrder | None
    ) -> None:
        """What becomes of a finished turn in the lower tier."""
        assert self.controller is not None
        assert self._demoting is not None
        if order is not None:
            self._demoting.is_turn_of(order.pin_id, request.request_id)
            self.lower.tier.ahead(request.request_id)
            if self._promoter is not None:
                self._promoter.pinned(request)
        elif self.controller.last_decision is not None:
            self._demoting.unpinned(request.request_id, blocks)
        else:
            self.lower.tier.forget(request.request_id)

    @guarded()
    def loads(self, request: Request) -> None:
        """The request's KV is on its way from below."""
        if self.controller is not None:
            self.controller.reloading(request.request_id)

    @guarded()
    def worker_output(self, output: KVConnectorOutput) -> None:
        """What the workers did in a step."""
        loads = self.lower.worker_output(output)
        if self.controller is None:
            return
        for load in loads:
            self.controller.reloaded(load.request_id, load.tokens)

    # --- events of the engine ------------------------------------------------

    @guarded()
    def before_step(self) -> None:
        """Expire pins; see which prefills are done."""
        if self.controller is None:
            return
        if self.ledger is not None:
            self.ledger.waiting_blocks = 0  # known anew when the head fails again
        if self.lower.is_set:
            self.controller.lower_tier = "cpu" if self.lower.is_up() else None
            for reload in self.lower.reloads():
                self.controller.learn_reload(reload.tier, reload.tokens, reload.seconds)
        if self._config.debug_invariants:
            self._check_invariants()
        self.controller.tick()
        if self._promoter is not None:
            self._promoter.tick(self._clock.now_s())
        self._history.save_if_due(self._clock.now_s())
        if not self._prefilling:
            return
        # A preempted request has output already when it loads its KV again.
        done = [
            request
            for request in self._prefilling.values()
            if request.num_output_tokens and not _is_loading(request)
        ]
        for request in done:
            del self._prefilling[request.request_id]
            self.controller.prefilled(request.request_id, request.num_prompt_tokens)

    def release_all(self) -> None:
        """Every reference goes, also those that a failing table has lost."""
        self.release_pins()
        self.drop_rest()

    @guarded()
    def release_pins(self) -> None:
        """Every pin that the controller knows."""
        if self.controller is not None:
            self.controller.release_all()
        if self._demoting is not None:
            self._demoting.release_demoting()

    @guarded(fallback=0)
    def drop_rest(self) -> int:
        """Blocks freed by giving back whatever is still referenced, unasked."""
        return 0 if self.ledger is None else drop_everything(self.ledger)

    @guarded()
    def shutdown(self) -> None:
        """The engine stops: let go of everything, keep what was learnt."""
        self.release_all()
        self._history.close()
        if self.controller is not None:
            self.controller.journal.close()
        self.lower.tier_shutdown()

    @guarded()
    def take_stats(self) -> TTLConnectorStats | None:
        """What happened since the last call; None when there is nothing to say."""
        if self.controller is None or self.ledger is None:
            return None
        metrics = self.controller.metrics
        if metrics.is_empty():
            interval_s = GAUGE_INTERVAL_S
        else:
            interval_s = EVENT_INTERVAL_S if self.num_running() else 0.0
        now_s = self._clock.now_s()
        if now_s - self._gauges_sent_s < interval_s:
            return None
        gauges = self._gauges()  # may fail: then nothing was drained yet
        self._gauges_sent_s = now_s
        return TTLConnectorStats(data=metrics.drain() | {"gauges": gauges})

    @guarded()
    def note_aged(self) -> None:
        """A request reached the bound on waiting."""
        self.count("aged_requests")

    @guarded()
    def foreign_step(self) -> None:
        """Per-step work under a scheduler class that is not ours."""
        if not self.announced:
            cls = self._vllm_config.scheduler_config.get_scheduler_cls()
            self.log_start(cls.__name__, ours=False)
        self.before_step()

    def count(self, name: str, label: str = "") -> None:
        if self.controller is not None:
            self.controller.metrics.count(name, label)

    def num_running(self) -> int | None:
        """Running requests, None under a foreign scheduler."""
        return None if self._scheduler is None else len(self._scheduler.running)

    def is_loading(self) -> bool:
        """Whether a request that holds its blocks waits for remote KV."""
        # Looked up among those admitted, not in the queue: thousands may wait there.
        return any(_is_loading(request) for request in self._prefilling.values())

    def is_overdue(self, request: Request) -> bool:
        return self._queue is not None and self._queue.is_aged(request.request_id)

    # --- inside --------------------------------------------------------------

    def _check_invariants(self) -> None:
        if self._scheduler is None or self.controller is None or self.ledger is None:
            return
        broken = violations(self._scheduler, self.controller, self.ledger)
        if broken:
            self.count("hook_errors", "invariants")
            log.error("ttlcache: broken invariants: %s", "; ".join(broken[:5]))

    def _about(self, pool: BlockPool) -> dict[str, Any]:
        """Head of a recording."""
        return {
            "model": str(getattr(self._vllm_config.model_config, "model", "")),
            "vllm": compat.vllm_version(),
            "ttlcache": compat.ttlcache_version(),
            "block_tokens": pool.hash_block_size,
            "pool_blocks": pool.num_gpu_blocks - 1,
        }

    def _gauges(self) -> dict[str, float]:
        assert self.controller is not None
        assert self.ledger is not None
        controller, pressure = self.controller, self.ledger.pressure()
        return {
            "pins_active": len(controller.pins),
            "pinned_blocks": pressure.pinned_blocks,
            "free_blocks": pressure.free_blocks,
            "pool_blocks": pressure.pool_blocks,
            "programs_active": len(controller.programs),
            "queueing_delay_seconds": controller.costs.queueing_delay_s,
            "memoryfulness": controller.memory.eta,
            "demoting_blocks": self._demoting.demoting_blocks if self._demoting else 0,
            "tier_up": float(self.lower.is_up()),
            "retention_enabled": float(controller.retention_enabled),
            "recorder_dropped_events": float(controller.journal.dropped),
        }

    def _detector(self, request: Request) -> Callable[[], Any] | None:
        reader = self._reader
        if reader is None or not reader.ready:
            return None
        return lambda: reader.read(request.output_token_ids)

    def _user_priority(self, request: Request) -> int:
        # vLLM ignores `priority` unless the operator allowed it; so do we.
        return int(request.priority) if self._heeds_priority else 0

    def _queue_counts(self) -> tuple[int, int]:
        scheduler = self._scheduler
        if scheduler is None:
            return 0, 0
        return len(scheduler.running), len(scheduler.waiting)

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


#: Finished normally; aborted, ignored and failed requests are not retained.
_COMPLETED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


def _is_loading(request: Request) -> bool:
    return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def _no_blocks(block_ids: tuple[list[int], ...]) -> tuple[list[int], ...]:
    return tuple([] for _ in block_ids)


def _token_slice(request: Request) -> Callable[[int, int], Any]:
    return lambda start, stop: request.all_token_ids[start:stop]
