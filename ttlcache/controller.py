"""The facade that an engine adapter calls: one method per event of a turn.

    arrive → (priority | may_start)* → on_allocated → prefilled → finish
           … gap: arrive | tick (the pin expires) | reclaim (memory is short)

The controller decides and keeps the tables; blocks are referenced and released
only through the `BlockHolder` that the adapter provides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from ttlcache import policies
from ttlcache.arrivals import Arrivals
from ttlcache.clock import Clock
from ttlcache.config import TTLCacheConfig, ordering_in_force
from ttlcache.cost_observer import Learning
from ttlcache.departures import Departures
from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.estimators.step_fit import Step
from ttlcache.estimators.survival import Memoryfulness
from ttlcache.programs.identity import Identifier
from ttlcache.programs.model import RequestRecord
from ttlcache.programs.places import Quantum
from ttlcache.programs.prefix_index import PrefixIndex
from ttlcache.programs.table import ProgramTable, client_key
from ttlcache.retention.open_turns import OnPinEnd, TurnBook
from ttlcache.retention.reclaim import Reclaimer
from ttlcache.retention.ttl import Remaining, Retention
from ttlcache.scheduling import admission, ordering
from ttlcache.scheduling.ordering import PriorityKey
from ttlcache.scheduling.queue_order import QueueOrder
from ttlcache.tables import Tables
from ttlcache.telemetry.journal import NullJournal
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.types import (
    Arrival,
    BlockHolder,
    Decision,
    Finish,
    PinOrder,
    PinOutcome,
    Urgency,
)

#: Silent programs that one step ends: after a quiet night there may be thousands.
ENDED_AT_ONCE = 256


class Controller:
    """Programs, pins, gaps, costs and one policy, driven by engine events."""

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
        journal: NullJournal | None = None,
        metrics: MetricsBuffer | None = None,
        on_pin_end: OnPinEnd | None = None,
    ) -> None:
        """
        Args:
            block_tokens: tokens per prefix-cache hash.
            on_rekey: told the id of a waiting request whose priority changed.
            journal: told every event.
            metrics: counts what happens.
            on_pin_end: told how a pin ends, just before its blocks are released.
        """
        self.tables = tables = Tables(
            config,
            clock,
            holder,
            block_tokens,
            gaps if gaps is not None else GapHistory(),
            costs if costs is not None else CostModel(),
            journal if journal is not None else NullJournal(),
            ProgramTable(config.max_programs, config.program_idle_s),
            metrics if metrics is not None else MetricsBuffer(),
        )
        self.config, self.block_tokens = config, block_tokens
        self.metrics, self.journal = tables.metrics, tables.journal
        self.gaps, self.costs = tables.gaps, tables.costs
        self.work = tables.work
        self.pins, self.programs = tables.pins, tables.programs
        self.requests = tables.requests
        self._clock = clock
        identifier = Identifier(
            self.programs,
            PrefixIndex(block_tokens),
        )
        self.queue_order = QueueOrder(
            ordering.create(ordering_in_force(config)),
            Quantum(config.quantum_turns),
            self.programs,
            self.pins,
            self.work,
            self.metrics,
        )
        self._admission = admission.create(config, block_tokens)
        self._turns = TurnBook(
            clock=clock,
            holder=holder,
            block_tokens=block_tokens,
            pins=self.pins,
            gaps=self.gaps,
            costs=self.costs,
            metrics=self.metrics,
            max_ttl_s=config.max_ttl_s,
            on_rekey=on_rekey,
            journal=self.journal,
            on_stall=self.queue_order.on_stall,
            on_unpinned=self._admission.on_unpinned,
            on_pin_end=on_pin_end,
        )
        self.reclaimer = Reclaimer(
            self.pins,
            holder,
            self._turns.end_pin,
            self._turns.shrink_pin,
            clock,
            config.max_pinned_fraction,
        )
        self._retention = Retention(
            config,
            policies.create(config.policy, config.policy_options),
            self.pins,
            holder,
            self.reclaimer,
            self.metrics,
            self.journal,
            lambda: self.programs.num_tenants(clock.now_s()),
        )
        self._learning = Learning(
            self.costs, self.work, self.metrics, self.journal, self.requests
        )
        self._gate = admission.AdmissionGate(self._admission, holder, block_tokens)
        self._departures = Departures(
            tables,
            identifier,
            self.queue_order,
            self._turns,
            self._retention,
            self._admission,
            self._learning,
        )
        self._arrivals = Arrivals(
            tables,
            identifier,
            self.queue_order,
            self._turns,
            self._retention,
            self._admission,
            self._departures,
        )

    @property
    def retention_enabled(self) -> bool:
        """False once `disable` was called."""
        return self.tables.retention_enabled

    @property
    def memoryfulness(self) -> Memoryfulness:
        """What programs' lengths say of turns left (paper §4.1)."""
        return self.tables.memoryfulness

    @property
    def last_decision(self) -> Decision | None:
        """Of the request that finished last, see `Tables`."""
        return self.tables.last_decision

    @property
    def lower_tier(self) -> str | None:
        """The tier that an expired turn's KV goes to, None while there is none."""
        return self.tables.lower_tier

    @lower_tier.setter
    def lower_tier(self, tier: str | None) -> None:
        if tier is not None and self.tables.lower_tier is None:
            self.tier_generation_changed()
        self.tables.lower_tier = tier

    def tier_generation_changed(self) -> None:
        """Whatever went down before need not be there: it was away, or was reset."""
        self.tables.lower_epoch += 1

    @property
    def reserved_pool_blocks(self) -> float:
        """Free blocks that new programs leave to those under way."""
        return self._admission.reserved_pool_blocks

    # --- a request comes -------------------------------------------------

    def arrive(self, arrival: Arrival) -> RequestRecord:
        """A request entered the queue: find its program, close its gap."""
        return self._arrivals.arrive(arrival)

    def priority(self, request_id: str, *, preempted: bool = False) -> PriorityKey:
        """Queue key of a waiting request; smaller is served first.

        Raises:
            KeyError: the request never arrived here.
        """
        return self.queue_order.key(self.requests[request_id], preempted)

    def requeue_if_moved(self, request_id: str) -> bool:
        """Whether the request's place is out of date; `priority` answers anew then.

        Asked about the head of the queue: others of its context may have used up the
        quantum since it was queued. A place may change once per quantum, no more.
        """
        record = self.requests.get(request_id)
        return record is not None and self.queue_order.requeue_if_moved(record)

    def may_start(self, request_id: str, needed_pool_blocks: float) -> bool:
        """Whether a waiting request may take memory now.

        To be asked only while the queue is in this controller's order: in another one a
        new program at the head would keep those under way waiting behind it.

        Args:
            needed_pool_blocks: beside those that it found cached.
        """
        record = self.requests.get(request_id)
        if (
            record is None
            or record.admitted_s is not None
            or not self.retention_enabled
        ):
            return True
        return self._gate.may_start(record, needed_pool_blocks)

    def free_for_newcomer(self, request_id: str, needed_pool_blocks: float) -> int:
        """`may_start` said no: pins that have no right to stay give way.

        Returns:
            Blocks that became free; 0 means that asking again is pointless.
        """
        record = self.requests.get(request_id)
        if record is None:
            return 0
        freed = self.reprice()
        missing = self._gate.missing_blocks(record, needed_pool_blocks)
        return freed + self.reclaimer.take_for_newcomer(record.program, missing)

    def on_memory_refused(self, request_id: str) -> None:
        """A waiting request lacks memory, or room that others are to have."""
        record = self.requests.get(request_id)
        if record is not None and record.refused_s is None:
            record.refused_s = self._clock.now_s()

    def on_allocated(self, request_id: str, cached_tokens: int) -> None:
        """The request got its blocks: it claims its pin.

        Args:
            cached_tokens: prompt tokens found in GPU memory.
        """
        self._arrivals.on_allocated(request_id, cached_tokens)

    def on_step(self, step: Step) -> None:
        """A step is computed: learn what prompt tokens cost."""
        self._learning.on_step(step, self._clock.now_s())

    def prefilled(self, request_id: str, prompt_tokens: int) -> None:
        """The first output token is there: learn what the lower tier had."""
        record = self.requests.get(request_id)
        if record is not None:
            self._learning.prefilled(record, prompt_tokens, self._clock.now_s())

    def tier_looked_up(self, request_id: str, chunk_tokens: int = 1) -> None:
        """The lower tier has looked for what GPU memory lacks of a waiting request.

        Args:
            chunk_tokens: it keeps whole chunks of so many, and no shorter context.
        """
        record = self.requests.get(request_id)
        if record is not None:
            record.asked_below = record.reusable_tokens >= chunk_tokens

    def load_started(self, request_id: str) -> None:
        """A part of an admitted request's prompt is on its way from a lower tier."""
        record = self.requests.get(request_id)
        if record is not None:
            record.reloads = True

    def load_finished(self, request_id: str, tokens: int) -> None:
        """`tokens` of the prompt came, 0 where that failed: prefill what is left."""
        if tokens <= 0:
            self.metrics.count("failed_reloads")
            return
        record = self.requests.get(request_id)
        if record is not None:
            record.cached_tokens += tokens
            record.reloaded_tokens += tokens

    def learn_reload(self, tier: str | None, tokens: int, seconds: float) -> None:
        """What a reload cost, from the order to the arrival of the last byte.

        tier: None where it is not known from which one it came.
        """
        self._learning.reloaded(tier, tokens, seconds)

    # --- a request goes --------------------------------------------------

    def finish(self, finish: Finish) -> PinOrder | None:
        """A request left the engine: decide, and maybe order a pin.

        The adapter must take the references of a returned order at once, before
        the engine frees the request's blocks.
        """
        return self._departures.finish(finish)

    def end(self, tenant: str, program_id: str, how: str = "told") -> bool:
        """A program is over: release all its pins. False if it is unknown."""
        program = self.programs.get(client_key(tenant, program_id))
        if program is None:
            return False
        self._departures.end(program, how)
        return True

    def progress(
        self, tenant: str, program_id: str, remaining: Remaining
    ) -> list[dict[str, Any]] | None:
        """A tool reports in mid-gap: decide again. None if the program is unknown."""
        program = self.programs.get(client_key(tenant, program_id))
        if program is None:
            return None
        now_s = self._clock.now_s()
        self.programs.touch(program, now_s)
        return self._retention.redecide_on_progress(
            program, remaining, self.tables.view(now_s), now_s
        )

    # --- time and pressure -----------------------------------------------

    def tick(self) -> None:
        """Before each step: expire pins, forget idle programs."""
        now_s = self._clock.now_s()
        for pin in self.pins.expired(now_s):
            view = self.tables.view(now_s)
            if not self._retention.redecide_at_deadline(pin, view, now_s):
                self._turns.end_pin(pin, PinOutcome.EXPIRED)
        for program in itertools.islice(self.programs.idle(now_s), ENDED_AT_ONCE):
            overdue = now_s - program.last_seen_s > self.config.program_idle_s
            self._departures.end(program, "idle" if overdue else "forgotten")

    def reprice(self) -> int:
        """A request waits for memory: pins made while nobody did are decided anew.

        Returns:
            Blocks that became free.
        """
        if not self.pins.any_provisional:
            return 0
        now_s = self._clock.now_s()
        view = self.tables.view(now_s)
        return self._retention.redecide_under_pressure(view, now_s)

    def reclaim(
        self,
        needed_blocks: int,
        urgency: Urgency,
        request_id: str,
        *,
        patient: bool = True,
    ) -> int:
        """Blocks freed from pins for a request that failed to get memory.

        patient: whether a stalled engine may wait for pins' next turns, as their policy
            asks; not once the request is overdue.
        """
        record = self.requests.get(request_id)
        return self.reclaimer.reclaim(
            max(1, needed_blocks),
            urgency,
            record.program if record else None,
            record.pin_id if record else None,
            self.queue_order.rank(record) if record else (),
            patient=patient,
        )

    def release_all(self) -> None:
        """Prefix-cache reset, sleep, shutdown: every pin goes."""
        for pin in list(self.pins):
            self._turns.end_pin(pin, PinOutcome.RESET)
        self.tier_generation_changed()  # what had not gone down yet never will

    def disable(self) -> None:
        """Stop retaining for good; requests go on as if we were not there."""
        self.tables.retention_enabled = False
        self.release_all()
