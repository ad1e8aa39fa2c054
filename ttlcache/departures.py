"""A request goes, or a whole program: what is retained, learnt and let go of."""

from __future__ import annotations

from dataclasses import dataclass

from ttlcache.cost_observer import Learning
from ttlcache.finished import finished_turn
from ttlcache.programs.identity import Identifier
from ttlcache.programs.model import Program, RequestRecord
from ttlcache.retention.open_turns import TurnBook
from ttlcache.retention.ttl import Retention
from ttlcache.scheduling.admission import AdmissionControl
from ttlcache.scheduling.queue_order import QueueOrder
from ttlcache.tables import Tables
from ttlcache.types import Finish, PinOrder, PinOutcome


@dataclass(slots=True)
class Departures:
    """Ends records of requests, and programs."""

    tables: Tables
    identifier: Identifier
    queue_order: QueueOrder
    turns: TurnBook
    retention: Retention
    admission: AdmissionControl
    learning: Learning

    def finish(self, finish: Finish) -> PinOrder | None:
        """A request left the engine: decide, and maybe order a pin."""
        tables = self.tables
        tables.last_decision = None
        record = tables.requests.pop(finish.request_id, None)
        if record is None:
            return None
        self._leave(record)
        program = record.program
        now_s = tables.clock.now_s()
        tables.journal.finish(now_s, record, finish)
        tables.programs.touch(program, now_s)
        context_blocks = finish.num_tokens / tables.block_tokens
        if record.admitted_s is not None:
            if now_s > record.admitted_s:
                self.queue_order.charge(record, now_s - record.admitted_s)
            if not program.ended:
                self.admission.on_turn_finished(program, context_blocks)
        if not finish.completed:
            self.admission.on_unpinned(program)
            return None
        program.turns_finished += 1
        uses_work = self.queue_order.ordering.uses_work
        self.learning.finished(record, finish, now_s, uses_work)
        if record.hints.is_last_step or program.ended:
            self.end(program, "last_step")
            return None
        order = self._retain(record, finish, now_s)
        if order is None:
            self.admission.on_unpinned(program)
        else:  # making room for it may have ended the program's other pins
            self.admission.on_turn_finished(program, context_blocks)
        return order

    def end(self, program: Program, how: str) -> None:
        """The program is over: release all its pins. Told twice counts once."""
        if program.ended:
            return
        tables = self.tables
        tables.programs.remove(program)
        tables.metrics.count("programs_ended", how)
        now_s = tables.clock.now_s()
        tables.journal.end(now_s, program, how)
        self.admission.on_program_end(program)
        if program.turns_finished:
            tables.memoryfulness.add(program.turns_finished)
        if program.work is not None:
            tables.work.on_program_end(program.work)
        self.queue_order.on_program_end(program)
        self.turns.close_all(program)
        self.turns.renew_parent(program)

    def forget(self, request_id: str) -> None:
        """The engine uses an id anew: if we never heard of its end, it left now."""
        stale = self.tables.requests.pop(request_id, None)
        if stale is not None:
            self._leave(stale)
            self.admission.on_unpinned(stale.program)

    def _retain(
        self, record: RequestRecord, finish: Finish, now_s: float
    ) -> PinOrder | None:
        tables, program = self.tables, record.program
        turn = finished_turn(record, finish, tables.block_tokens, now_s)
        if turn.outline:
            program.last_turn = turn
        self.turns.open(program, turn)
        self.identifier.remember(program, finish)
        tables.costs.observe_footprint(finish.footprint_blocks or finish.kv_blocks)
        context_blocks = finish.num_tokens / tables.block_tokens
        self.admission.on_footprint(context_blocks, finish.footprint_blocks)
        if not tables.retention_enabled or record.hints.rejected:
            return None
        if tables.lower_tier is not None:
            turn.lower_epoch = tables.lower_epoch
        rank = self.queue_order.rank_after_this_turn(record)
        tables.last_decision, order = self.retention.retain(
            record, turn, finish, rank, tables.view(now_s), now_s
        )
        return order

    def _leave(self, record: RequestRecord) -> None:
        """The request is gone; somebody else may continue a turn it did not claim."""
        program, pins = record.program, self.tables.pins
        program.in_flight -= 1
        if not self.tables.requests:
            self.tables.backlog.on_idle()
        pin = pins.get(record.pin_id)
        record.pin_id = None
        if pin is None:
            return
        pins.unhold(pin, record.request_id)
        if pin.held:
            return
        if program.ended:
            self.turns.end_pin(pin, PinOutcome.ENDED)
        else:
            self.turns.bound(program)
