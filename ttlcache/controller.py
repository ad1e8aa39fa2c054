"""The life of a request, top to bottom: one method per event that an engine reports.

    on_arrival → (queue.priority | memory.may_start)* → on_allocated → on_prefilled
           → on_finished
           … gap: on_arrival | tick (the pin expires) | memory.reclaim (memory is short)

What an engine asks between the events it asks `Controller.queue` and
`Controller.memory`; what it sees of a lower tier it tells `Controller.tier_knowledge`.
The adapter references blocks as `Finished.order` says; they are released only through
the `BlockHolder` that it provides.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from ttlcache import policies
from ttlcache.clock import Clock
from ttlcache.config import TTLCacheConfig, max_wait_in_force, ordering_in_force
from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.estimators.memoryfulness import Memoryfulness
from ttlcache.estimators.plain_cache import PlainCache
from ttlcache.estimators.step_fit import Step
from ttlcache.programs.continuation import relate
from ttlcache.programs.divergence import compare
from ttlcache.programs.fair_queueing import Quantum
from ttlcache.programs.identity import Identifier
from ttlcache.programs.model import Claim, Pin, Program, RequestRecord
from ttlcache.programs.prefix_index import PrefixIndex
from ttlcache.programs.prompt_fingerprint import GenerationPrompt
from ttlcache.programs.table import ProgramTable
from ttlcache.retention.awaited_turns import AwaitedTurns
from ttlcache.retention.decisions import Remaining, Retention
from ttlcache.retention.pin_table import PinTable
from ttlcache.retention.reclaim import Reclaimer
from ttlcache.retention.shadow import ShadowHolder
from ttlcache.retention.tier_knowledge import TierKnowledge
from ttlcache.scheduling import admission, ordering
from ttlcache.scheduling.memory import MemoryArbiter
from ttlcache.scheduling.queue_order import QueueOrder
from ttlcache.scheduling.remaining_work import RemainingWork
from ttlcache.scheduling.wait_bound import WaitBound
from ttlcache.telemetry.events import Telemetry
from ttlcache.types import Arrival, BlockHolder, Finish, Finished, PinOutcome
from ttlcache.types import IdentityRule as Rule

#: Silent programs, and expired pins, that one step ends: after a quiet night there may
#: be thousands.
ENDED_AT_ONCE = 256
#: Nothing was decided, and nothing is pinned.
NOTHING_RETAINED = Finished()


class Controller:
    """Programs, pins, gaps, costs and one policy, driven by engine events.

    queue: in which order waiting requests are served.
    memory: which of them may start, and which pins give way for them.
    tier_knowledge: what is known of the lower tier.
    admission: how much programs under way will grow.
    retention: which turns are pinned, and for how long.
    memoryfulness: what programs' lengths say of turns left (paper §4.1).
    requests: those between arrival and finish.
    """

    def __init__(
        self,
        config: TTLCacheConfig,
        clock: Clock,
        holder: BlockHolder,
        block_tokens: int,
        *,
        gaps: GapHistory | None = None,
        costs: CostModel | None = None,
        on_rekey: Callable[[str], None] | None = None,
        on_client_ended_program: Callable[[Program], None] | None = None,
        telemetry: Telemetry | None = None,
        engine_id: int = 0,
    ) -> None:
        """
        Args:
            block_tokens: tokens per prefix-cache hash.
            on_rekey: told the id of a waiting request whose priority changed.
            on_client_ended_program: told a program that its client ended.
            telemetry: told every event.
            engine_id: see `ProgramTable`.
        """
        self.config, self.block_tokens = config, block_tokens
        self._clock, self._on_rekey = clock, on_rekey
        self._on_client_ended_program = on_client_ended_program
        self.gaps = gaps or GapHistory()
        self.costs = costs or CostModel()
        self.memoryfulness = Memoryfulness()
        self.telemetry = telemetry or Telemetry()
        self.programs = ProgramTable(config.program_idle_s, engine_id=engine_id)
        self.requests: dict[str, RequestRecord] = {}
        self.pins = PinTable()
        self._shadow = ShadowHolder(holder, self.pins) if config.observes else None
        holder = self._shadow or holder
        self.tier_knowledge = TierKnowledge(
            config.lower_tier, self.requests, self.costs, self.telemetry
        )
        wait_bound = WaitBound(
            max_wait_in_force(config), self.tier_knowledge, self.requests
        )
        self.queue = QueueOrder(
            self.requests,
            ordering.create(ordering_in_force(config)),
            Quantum(config.quantum_turns),
            self.programs,
            self.pins,
            RemainingWork(),
            wait_bound,
            self.telemetry,
        )
        self.admission = admission.create(config, block_tokens)
        self._plain = PlainCache()
        self._turns = AwaitedTurns(
            clock=clock,
            holder=holder,
            block_tokens=block_tokens,
            pins=self.pins,
            gaps=self.gaps,
            costs=self.costs,
            plain=self._plain,
            telemetry=self.telemetry,
            on_rekey=on_rekey,
            on_stall=self.queue.on_stall,
            on_unclaimed=self.admission.on_no_pin,
        )
        reclaimer = Reclaimer(
            self.pins,
            holder,
            self._turns,
            clock,
            config.max_pinned_fraction,
        )
        self.retention = Retention(
            config,
            policies.create(config.policy, config.policy_options),
            self.gaps,
            self.costs,
            self.memoryfulness,
            self.tier_knowledge,
            self.pins,
            holder,
            reclaimer,
            self.telemetry,
            lambda: self.programs.num_tenants(clock.now_s()),
        )
        self.memory = MemoryArbiter(
            self.requests,
            clock,
            holder,
            block_tokens,
            self.queue,
            self.admission,
            self.pins,
            self._turns,
            self.retention,
            reclaimer,
            self.tier_knowledge,
        )
        self._identifier = Identifier(self.programs, PrefixIndex(block_tokens))
        self._generation_prompt = GenerationPrompt()
        #: Requests that wait, by program: to count them at every scrape takes too long.
        self._waiting: Counter[int] = Counter()
        self._last_seq = 0
        self._step_ended_s = -math.inf

    # --- a request comes -------------------------------------------------

    def on_arrival(self, arrival: Arrival) -> RequestRecord:
        """A request entered the queue: find its program, close its gap."""
        now_s = self._clock.now_s()
        self.forget(arrival.request_id)
        known = len(self.programs)
        if not self.requests:
            self._plain.on_idle_until(now_s)
        program, rule = self._identifier.identify(arrival, now_s)
        if len(self.programs) > known:
            self.telemetry.metrics.count("programs_started")
            self.retention.make_room_for_others()
        continuation = relate(program, arrival, self.block_tokens)
        record = self._new_record(arrival, program, now_s)
        record.stable_tokens = self._generation_prompt.stable_tokens(arrival)
        if rule in (Rule.HINT, Rule.SESSION):
            record.head_tokens, record.divergence = compare(
                program, arrival, continuation, self.block_tokens
            )
        self.queue.on_arrival(record, continuation)
        self.requests[record.request_id] = record
        program.live_requests += 1
        self._waiting[id(program)] += 1
        pin, record.reusable_tokens = self._turns.follow(
            program, continuation, record.request_id, now_s
        )
        if pin is not None and not arrival.reads_cache:
            # It would wait for the memory of a pin that is of no use to it.
            self.pins.remove_claimant(pin, record.request_id)
            if not pin.has_claimant:
                self._turns.end_pin(pin, PinOutcome.VICTIM)
        elif pin is not None:
            record.pin_id = pin.pin_id
        if continuation.turn is not None:
            record.tier_generation = continuation.turn.tier_generation
        self._plain.on_arrival(record.request_id, program.key, record.num_tokens, now_s)
        self.telemetry.on_arrival(now_s, record, rule, arrival, continuation)
        return record

    def on_allocated(
        self, request_id: str, cached_tokens: int, *, loads: bool = False
    ) -> None:
        """The request got its blocks: it claims its pin.

        Args:
            cached_tokens: prompt tokens found in GPU memory.
            loads: the lower tier loads more; it gets its blocks again after that.
        """
        record = self.requests.get(request_id)
        if record is None:
            return
        now_s = self._clock.now_s()
        has_loaded, record.is_loading = record.is_loading, loads
        if has_loaded:
            record.lacks_memory_since_s = None
            return
        first = record.admitted_s is None
        if first:
            self._stop_waiting(record)
            record.admitted_s = now_s
            self.tier_knowledge.on_allocated(record, cached_tokens)
            was_newcomer = self.admission.is_newcomer(record.program)
            record.program.has_started = True
            self.queue.on_allocated(record, now_s)
            context_blocks = record.num_tokens / self.block_tokens
            if record.place.turns == 1 and not record.program.turns_finished:
                self._plain.on_program_start(record.program.key, cached_tokens)
            self.admission.on_context(record.program, context_blocks)
            if was_newcomer:
                if record.place.turns == 1:  # a retry finds its own prompt
                    self.admission.on_program_start(cached_tokens / self.block_tokens)
                self._on_program_start(record.program)
        pin = self.pins.get(record.pin_id)
        record.pin_id = None
        claim = None if pin is None else self._claim(pin, record, cached_tokens)
        self.telemetry.on_allocated(now_s, record, cached_tokens, claim, not first)
        record.lacks_memory_since_s = None
        if pin is not None:
            self._turns.end_pin(pin, PinOutcome.CLAIMED)
        elif first and record.lost_its_kv(cached_tokens):
            self.costs.observe_return_wait(now_s - record.queued_s)
        # With real pins a request would wait for memory now.
        if self._shadow is not None and self._shadow.lacks_memory():
            self.memory.redecide_under_pressure()

    def on_step(self, step: Step) -> None:
        """A step is computed: learn what prompt tokens cost.

        It began when it was scheduled, or when the one before it ended: engines may
        schedule a step while another one runs.
        """
        now_s, is_ahead = self._clock.now_s(), step.start_s < self._step_ended_s
        seconds = now_s - max(step.start_s, self._step_ended_s)
        self._step_ended_s = now_s
        self.costs.observe_step(step, seconds, is_ahead=is_ahead)
        self._plain.on_step(step.start_s, now_s, prefills=bool(step.prompts))

    def on_paused(self, paused_s: float, *, all_stood: bool) -> None:
        """For so long no request was to start: that was no waiting for others.

        all_stood: none ran, either: that was no service.
        """
        now_s = self._clock.now_s()
        for record in self.requests.values():
            if all_stood or record.admitted_s is None:
                record.shift_times(paused_s, now_s)
        if all_stood:
            self.queue.last_started_s = min(now_s, self.queue.last_started_s + paused_s)

    def on_prefilled(self, request_id: str) -> None:
        """The first output token is there: learn what the lower tier had."""
        record = self.requests.get(request_id)
        if record is None or record.admitted_s is None:
            return
        if record.first_token_s is not None:
            return
        record.first_token_s = self._clock.now_s()
        self.tier_knowledge.on_prefilled(record)

    # --- a request goes --------------------------------------------------

    def on_finished(self, finish: Finish) -> Finished:
        """A request left the engine: decide, and maybe order a pin."""
        record = self.requests.pop(finish.request_id, None)
        if record is None:
            return NOTHING_RETAINED
        self._leave(record)
        program = record.program
        now_s = self._clock.now_s()
        self.telemetry.on_finished(now_s, record, finish)
        self.programs.touch(program, now_s)
        context_blocks = finish.num_tokens / self.block_tokens
        if record.admitted_s is not None:
            if now_s > record.admitted_s:
                self.queue.on_service(record, now_s - record.admitted_s)
            if not program.ended:
                self.admission.on_context(program, context_blocks)
        if not finish.completed:
            self.admission.on_no_pin(program)
            if isinstance(program.key, int) and program.is_empty:
                self._end(program, "forgotten")  # no retry would be recognised
            return NOTHING_RETAINED
        program.turns_finished += 1
        self._plain.on_turn_end(program.key, finish.num_tokens, now_s)
        self._learn_outputs(record, finish, now_s)
        if record.hints.is_last_step or program.ended:
            self._end(program, "last_step")
            return NOTHING_RETAINED
        finished = self._retain(record, finish, now_s)
        if finished.order is None:
            self.admission.on_no_pin(program)
        else:  # making room for it may have ended the program's other pins
            self.admission.on_context(program, context_blocks)
        return finished if self._shadow is None else Finished(finished.decision)

    def on_progress(
        self, tenant: str, program_id: str, remaining: Remaining
    ) -> list[dict[str, Any]] | None:
        """A tool reports in mid-gap: decide again. None if the program is unknown."""
        program = self.programs.find(tenant, program_id)
        if program is None:
            return None
        now_s = self._clock.now_s()
        self.programs.touch(program, now_s)
        return self.retention.redecide_on_progress(program, remaining, now_s)

    def tick(self) -> None:
        """Before each step: expire pins, forget idle programs."""
        now_s = self._clock.now_s()
        for pin in self.pins.expired(now_s, ENDED_AT_ONCE):
            if not self.retention.redecide_at_deadline(pin, now_s):
                self._turns.end_pin(pin, PinOutcome.EXPIRED)
        for program in itertools.islice(self.programs.idle(now_s), ENDED_AT_ONCE):
            is_idle = now_s - program.last_seen_s > self.config.program_idle_s
            self._end(program, "idle" if is_idle else "forgotten")

    def end_program(self, tenant: str, program_id: str) -> bool:
        """A program is over: release all its pins. False if it is unknown."""
        program = self.programs.find(tenant, program_id)
        if program is None:
            return False
        self._end(program, "told")
        if self._on_client_ended_program is not None:
            self._on_client_ended_program(program)
        return True

    # --- the engine's life ------------------------------------------------

    @property
    def retention_enabled(self) -> bool:
        """False once `disable` was called."""
        return self.retention.is_enabled

    def disable(self) -> None:
        """Stop retaining for good; requests go on as if we were not there."""
        self.retention.is_enabled = False
        self.memory.release_all()

    def num_waiting(self, program: Program) -> int:
        """Its requests that have no memory yet."""
        return self._waiting[id(program)]

    def gauges(self) -> dict[str, float]:
        """The present state, by the names of `metrics.GAUGES`."""
        return {
            "pins_active": len(self.pins),
            "programs_active": len(self.programs),
            "waiting_programs": len(self._waiting),
            "growth_blocks": self.admission.reserved_pool_blocks,
            "lower_tier_kept_share": self.costs.kept_share,
            "queueing_delay_seconds": self.costs.queueing_delay_s,
            "memoryfulness": self.memoryfulness.eta,
            "seniority_quantum_seconds": self.queue.quantum.seconds,
            "retention_enabled": float(self.retention_enabled),
            "recorder_dropped_events": float(self.telemetry.dropped),
        }

    # --- of an arrival ----------------------------------------------------

    def _new_record(
        self, arrival: Arrival, program: Program, now_s: float
    ) -> RequestRecord:
        self._last_seq += 1
        hints = arrival.hints
        if hints.priority_class is not None:
            program.priority_class = hints.priority_class
        return RequestRecord(
            arrival.request_id,
            program,
            hints,
            self._last_seq,
            now_s,  # queued_s
            arrival.user_priority,
            program.place,
            arrival.num_tokens,
        )

    def _claim(self, pin: Pin, record: RequestRecord, cached_tokens: int) -> Claim:
        """The request takes its pin over."""
        if self._shadow is None:
            return self._turns.account_claim(pin, record, cached_tokens)
        # If the pin were real; the last token is always computed.
        claimed = min(pin.kv_tokens, record.num_tokens - 1)
        kept = min(cached_tokens, claimed)
        saved_s = self.costs.prefill_s(claimed, kept)
        return Claim(pin.pin_id, claimed, claimed - kept, saved_s, is_real=False)

    # --- of an end --------------------------------------------------------

    def forget(self, request_id: str) -> None:
        """If we never heard of the request's end, it left now."""
        stale = self.requests.pop(request_id, None)
        if stale is not None:
            self._leave(stale)
            self.admission.on_no_pin(stale.program)

    def _on_program_start(self, program: Program) -> None:
        """Its other requests, rare as they are, are those of no newcomer any more."""
        if self._on_rekey is None or id(program) not in self._waiting:
            return
        for other in self.requests.values():
            if other.program is program and other.admitted_s is None:
                self._on_rekey(other.request_id)

    def _stop_waiting(self, record: RequestRecord) -> None:
        """It was admitted, or it left."""
        program = id(record.program)
        self._waiting[program] -= 1
        if self._waiting[program] <= 0:  # below, after a fault in `on_arrival`
            del self._waiting[program]

    def _leave(self, record: RequestRecord) -> None:
        """The request is gone; another may continue a turn it did not claim."""
        program = record.program
        program.live_requests -= 1
        self._plain.on_leave(record.request_id)
        if record.admitted_s is None:
            self._stop_waiting(record)
        pin = self.pins.get(record.pin_id)
        record.pin_id = None
        if pin is None:
            return
        self.pins.remove_claimant(pin, record.request_id)
        if pin.has_claimant:
            return
        if program.ended:
            self._turns.end_pin(pin, PinOutcome.ENDED)
        else:
            self._turns.drop_excess(program)

    def _learn_outputs(
        self, record: RequestRecord, finish: Finish, now_s: float
    ) -> None:
        """What the turn took of the engine, without waits and repeated prefills."""
        outputs = finish.num_tokens - finish.prompt_tokens
        if record.first_token_s is not None and outputs > 1:
            decode_s = (now_s - record.first_token_s) / (outputs - 1)
            self.queue.work.on_decoded(decode_s)
        if self.queue.ordering.uses_work and not record.program.ended:
            self.queue.learn_work(
                record,
                self.costs.prefill_s(finish.prompt_tokens, record.reusable_tokens),
                outputs,
                now_s,
            )

    def _retain(self, record: RequestRecord, finish: Finish, now_s: float) -> Finished:
        turn = self._turns.open(record, finish, now_s)
        self._identifier.remember(record, finish)
        kv_context_blocks = finish.kv_tokens / self.block_tokens
        self.admission.on_pool_blocks(kv_context_blocks, finish.kv_blocks)
        if not self.retention.is_enabled or record.hints.rejected:
            return NOTHING_RETAINED
        self.tier_knowledge.on_turn_end(turn)
        rank = self.queue.rank_after_this_turn(record)
        return self.retention.retain(record, turn, finish, rank, now_s)

    def _end(self, program: Program, how: str) -> None:
        """The program is over: release all its pins. Told twice counts once."""
        if program.ended:
            return
        self.programs.remove(program)
        self.telemetry.on_program_end(self._clock.now_s(), program, how)
        self.admission.on_program_end(program)
        self._plain.on_program_end(program.key)
        if program.turns_finished:
            self.memoryfulness.add(program.turns_finished)
        self.queue.on_program_end(program)
        self._turns.close_all(program)
        self.retention.redecide_on_subagent_end(program, self._clock.now_s())
