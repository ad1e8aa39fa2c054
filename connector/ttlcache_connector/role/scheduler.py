"""The scheduler role of TTLConnector: vLLM's events to the core's controller."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ttlcache import control
from ttlcache.clock import stopwatch_s
from ttlcache.programs.hints import parse_hints
from ttlcache.retention.ttl import reusable_blocks
from ttlcache.types import Arrival, Finish, Finished
from ttlcache_connector.blocks.failsafe import MAX_SLOW_IN_A_ROW, SLOW_FINISH_S
from ttlcache_connector.engine.failed_loads import put_back
from ttlcache_connector.engine.request_view import (
    drop_unfit_args,
    is_completed,
    is_loading,
    is_prompt_done,
    no_blocks,
    step_of,
    token_slice,
)
from ttlcache_connector.faults import guarded
from ttlcache_connector.invariants import leaked_blocks, violations
from ttlcache_connector.log import logger
from ttlcache_connector.role.metrics import TTLConnectorStats
from ttlcache_connector.role.queue_answers import QueueAnswers
from ttlcache_connector.tiers.turn_report import turn_end

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ttlcache.controller import Controller
    from ttlcache.programs.model import Program


log = logger(__name__)

#: Gauges are sent at least this often while the engine steps.
GAUGE_INTERVAL_S = 1.0
#: Events are sent at once when the engine comes to rest, and at most this often while
#: requests run: turns end at nearly every step, and to send costs more than to count.
EVENT_INTERVAL_S = 0.1


class SchedulerSide(QueueAnswers):
    """Events of requests and of the engine, passed to one engine's controller.

    Every method that vLLM may call is guarded.
    """

    @guarded()
    def arrive(self, request: Request) -> None:
        """Idempotent: our scheduler calls it before queueing, vLLM after."""
        dropped = drop_unfit_args(request)
        controller = self.controller
        if controller is None or request.request_id in controller.requests:
            return
        for reason in dropped:
            controller.telemetry.metrics.count("hints_rejected", reason)
        params = request.sampling_params
        hints = parse_hints(
            request.kv_transfer_params, params.extra_args if params else None
        )
        record = controller.arrive(
            Arrival(
                request_id=request.request_id,
                num_tokens=request.num_tokens,
                hashes=request.block_hashes,
                tokens=token_slice(request),
                hints=hints,
                tenant=request.cache_salt or "",
                session_id=request.session_id,
                user_priority=self._user_priority(request),
            )
        )
        self._divergences.on_arrival(record)
        self.lower.tier_arrive(request, has_pin=record.pin_id is not None)

    @guarded()
    def note_local_hit(self, request: Request, num_computed_tokens: int) -> None:
        self._local_hits[request.request_id] = num_computed_tokens
        if self.ledger is not None:
            self.ledger.plain_lru.on_lookup()

    @guarded()
    def tier_looked_up(self, request: Request) -> None:
        """The lower tier was asked; vLLM uses no answer for some requests."""
        if self.controller is not None and not request.skip_reading_prefix_cache:
            chunk_tokens = self.lower.tier.chunk_tokens
            self.controller.tier.on_lookup(request.request_id, chunk_tokens)

    @guarded(fallback=math.inf)
    def stored_tokens(self, request: Request) -> float:
        """Upper bound on the request's tokens that the tier can hold.

        If the request continues a pinned turn, nothing beyond that turn has ever been
        computed, so it is not looked up. Without a live pin: unknown, infinity.
        """
        if self.controller is None or self.ledger is None:
            return math.inf
        record = self.controller.requests.get(request.request_id)
        pin_id = None if record is None else record.pin_id
        pin = None if pin_id is None else self.controller.pins.get(pin_id)
        if pin is None or not pin.turn.num_hashes:
            return math.inf
        return pin.turn.num_hashes * self.ledger.pool.hash_block_size

    @guarded()
    def on_allocated(self, request: Request) -> None:
        """The request holds its blocks: claim its pin."""
        request_id = request.request_id
        hit = self._local_hits.pop(request_id, 0)
        if self._queue is not None:
            self._queue.forget(request_id)
        if self.controller is None:
            return
        record = self.controller.requests.get(request_id)
        self.controller.on_allocated(request_id, hit)
        if self._demoting is not None and record is not None:
            self._demoting.on_program_resumed(record.program)
        self._prefilling[request_id] = request

    @guarded()
    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """A request ends, its blocks still referenced: pin them or not."""
        started_s = stopwatch_s()
        if self.lower.is_set:
            self.lower.tier_finished(request, block_ids)
        self._local_hits.pop(request.request_id, None)
        self._prefilling.pop(request.request_id, None)
        self._arrived.discard(request.request_id)
        if self._queue is not None:
            self._queue.forget(request.request_id)
        controller, ledger = self.controller, self.ledger
        if controller is None or ledger is None:
            return
        if request.num_output_tokens:
            controller.prefilled(request.request_id, request.num_prompt_tokens)
        record = controller.requests.get(request.request_id)
        completed = is_completed(request, self._reader)
        candidate = ledger.candidate(block_ids if completed else no_blocks(block_ids))
        finished = controller.finish(
            Finish(
                request_id=request.request_id,
                completed=completed,
                num_tokens=request.num_tokens,
                prompt_tokens=request.num_prompt_tokens,
                hashes=request.block_hashes,
                tokens=token_slice(request),
                kv_blocks=len(candidate.blocks),
                kv_tokens=candidate.kv_tokens,
                count_unpinned=lambda n: ledger.count_unpinned(candidate.blocks[:n]),
                footprint_blocks=candidate.footprint_blocks,
                divisible=ledger.is_divisible,
                detect=self._detector(request),
            )
        )
        order = finished.order
        if order is not None:
            pinned = candidate.blocks[: order.kv_blocks]
            ledger.hold(order.pin_id, pinned, len(candidate.blocks) - len(pinned))
        ledger.plain_lru.on_uncached_freed(ledger.count_uncached(block_ids))
        if self._demoting is not None:
            if record is not None:
                self._offer_to_tier(request, record.program, candidate.blocks, finished)
            else:
                self.lower.tier.drop(request.request_id)
            if completed and record is not None:
                self.lower.report_turn(
                    turn_end(request.request_id, record, finished.decision)
                )
        took_s = stopwatch_s() - started_s
        controller.telemetry.metrics.observe("decide_seconds", took_s)
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
        """Orders of clients and operators, see `ttlcache.control`."""
        if self.controller is None:
            return {}
        self.controller.tick()
        answer: dict[str, Any] = control.obey(
            self.controller, order, self._clock.now_s()
        )
        return answer | {"gauges": self._gauges()}

    def _offer_to_tier(
        self,
        request: Request,
        program: Program,
        blocks: list[KVCacheBlock],
        finished: Finished,
    ) -> None:
        """What becomes of a finished turn in the lower tier."""
        assert self._demoting is not None
        order = finished.order
        if order is not None:
            self._demoting.bind_pin_to_request(
                order.pin_id, request.request_id, program
            )
            reusable = blocks[: reusable_blocks(program, len(blocks))]
            self._demoting.linger_rest(
                request.request_id, program, reusable, order.kv_blocks
            )
        elif finished.decision is not None:
            self._demoting.on_unpinned(request.request_id, program, blocks)
        else:
            self.lower.tier.drop(request.request_id)

    @guarded()
    def load_started(self, request: Request) -> None:
        """A part of the request's KV is being loaded from the lower tier."""
        self._arrived.discard(request.request_id)
        if self.controller is not None:
            self.controller.tier.on_load_started(request.request_id)

    @guarded()
    def worker_output(self, output: KVConnectorOutput) -> None:
        """What the workers did in a step."""
        # Others' loads, too: beside us there may be another connector.
        self._arrived.update(output.finished_recving or ())
        self._arrived.intersection_update(self._prefilling)
        loads = self.lower.worker_output(output)
        if self.controller is None:
            return
        for load in loads:
            self.controller.tier.on_load_finished(load.request_id, load.tokens)
        self._count_demotions()

    @guarded()
    def tier_settled(self) -> None:
        """Free the blocks that were held for copies which have begun, or never will."""
        ended = self._demoting
        if ended is None:
            return
        failed: Exception | None = None
        for request_id in self.lower.take_settled():
            try:
                ended.on_settled(request_id)
            except Exception as error:  # noqa: BLE001 - the others are freed, too
                failed = error
        if failed is not None:
            raise failed

    @guarded()
    def put_back_failed_loads(self) -> None:
        if self._scheduler is not None:
            put_back(self._scheduler)

    @guarded()
    def before_step(self) -> None:
        """Expire pins; see which prefills are done."""
        self.release_if_off()
        self.put_back_failed_loads()
        if self.controller is None:
            return
        if self.ledger is not None:
            self.ledger.wanted_blocks = 0  # known anew when the head fails again
        if self.lower.is_set:
            self._poll_tier(self.controller)
        if self._config.debug_invariants:
            self._check_invariants()
        self.controller.tick()
        self._history.save_if_due(self._clock.now_s())
        if not self._prefilling:
            return
        # A preempted request has output already when it loads its KV again.
        done = [
            request
            for request in self._prefilling.values()
            if request.num_output_tokens
            and is_prompt_done(request)
            and not is_loading(request)
        ]
        for request in done:
            del self._prefilling[request.request_id]
            self._arrived.discard(request.request_id)
            self.controller.prefilled(request.request_id, request.num_prompt_tokens)

    def _poll_tier(self, controller: Controller) -> None:
        """Whether the lower tier is there, still the same, and what happened there."""
        controller.tier.on_source("cpu" if self.lower.is_up() else None)
        generation = self.lower.tier.generation
        if generation != self._lower_generation:
            self._lower_generation = generation
            controller.tier.on_new_generation()
        for reload in self.lower.reloads():
            controller.tier.learn_reload(reload.tier, reload.tokens, reload.seconds)
        self._count_demotions()

    def _count_demotions(self) -> None:
        for outcome in self.lower.take_events():
            self.count("demotions", outcome)
        if self._demoting is not None:
            for _ in range(self._demoting.take_dropped_copies()):
                self.count("demotions", "dropped")

    @guarded()
    def shutdown(self) -> None:
        """The engine stops: release everything, keep what was learnt."""
        self.release_all()
        self._history.close()
        if self.controller is not None:
            self.controller.telemetry.close()
        self.lower.tier_shutdown()

    @guarded()
    def take_stats(self) -> TTLConnectorStats | None:
        """What happened since the last call; None when there is nothing to say."""
        if self.controller is None or self.ledger is None:
            return None
        metrics = self.controller.telemetry.metrics
        if metrics.is_empty():
            interval_s = GAUGE_INTERVAL_S
        else:
            interval_s = EVENT_INTERVAL_S if self.num_running() else 0.0
        now_s = self._clock.now_s()
        if now_s - self._gauges_sent_s < interval_s:
            return None
        gauges = self._gauges()  # may fail: then nothing was drained yet
        if gauges["leaked_blocks"]:
            self.drop_orphans()  # the gauge is what it found
        self._gauges_sent_s = now_s
        return TTLConnectorStats(data=metrics.drain() | {"gauges": gauges})

    @guarded()
    def foreign_step(self) -> None:
        """Per-step work under a scheduler class that is not ours."""
        if not self.announced:
            cls = self._vllm_config.scheduler_config.get_scheduler_cls()
            self.log_start(cls.__name__, ours=False)
        self.before_step()

    @guarded()
    def step_scheduled(self, output: SchedulerOutput) -> None:
        """A step begins, or waits for the one before it."""
        step = step_of(output, self._prefilling.values(), self._clock.now_s())
        self._steps.append((output, step))

    @guarded()
    def step_done(self, output: SchedulerOutput | None = None) -> None:
        """The results of a step are there; None: of the oldest one under way."""
        for index, (scheduled, step) in enumerate(self._steps):
            if output is None or scheduled is output:
                for _ in range(index + 1):
                    self._steps.popleft()
                if self.controller is not None:
                    self.controller.on_step(step)
                return

    @guarded()
    def start_copies_ahead(self, scheduled_tokens: Mapping[str, int]) -> None:
        """A step's memory was given: make room for the next, whose copies begin in it.

        Args:
            scheduled_tokens: by request, what it computes in this step.
        """
        ended = self._demoting
        if ended is None or self.controller is None or self.ledger is None:
            return
        lack = ended.start_copies_ahead(lambda: self._tokens_ahead(scheduled_tokens))
        for pin in self.controller.pins.victims() if lack else ():
            if self.ledger.is_freeable(pin.pin_id):
                lack -= ended.copy_tail_ahead(pin.pin_id, lack)
                if lack <= 0:
                    return

    def _tokens_ahead(self, scheduled_tokens: Mapping[str, int]) -> list[int]:
        if self._scheduler is None:  # a foreign one: as much as may ever be needed
            return [self._vllm_config.scheduler_config.max_num_batched_tokens]
        done = scheduled_tokens.get
        return [
            # Below 0 where a token is on its way from the worker.
            max(0, r.num_tokens - r.num_computed_tokens - done(r.request_id, 0))
            for r in self._scheduler.running
        ]

    def _check_invariants(self) -> None:
        if self._scheduler is None or self.controller is None or self.ledger is None:
            return
        broken = violations(self._scheduler, self.controller, self.ledger)
        if broken:
            self.count("hook_errors", "invariants")
            log.error("ttlcache: broken invariants: %s", "; ".join(broken[:5]))

    def _gauges(self) -> dict[str, float]:
        assert self.controller is not None
        assert self.ledger is not None
        pressure, ended = self.ledger.pressure(), self._demoting
        return self.controller.gauges() | {
            "pinned_blocks": pressure.pinned_blocks,
            "free_blocks": pressure.free_blocks,
            "pool_blocks": pressure.pool_blocks,
            "demoting_blocks": ended.demoting_blocks if ended else 0,
            "lingering_blocks": ended.lingering_blocks if ended else 0,
            "leaked_blocks": leaked_blocks(
                self._scheduler, self.controller, self.ledger
            ),
            "tier_up": float(self.lower.is_up()),
        }

    def _detector(self, request: Request) -> Callable[[], Any] | None:
        reader = self._reader
        if reader is None or not reader.ready:
            return None
        return lambda: reader.read(request.output_token_ids)
