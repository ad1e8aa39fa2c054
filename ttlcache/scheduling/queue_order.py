"""Where requests stand in the queue, and when that changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ttlcache.programs.continuation import Continuation, Relation
from ttlcache.programs.fair_queueing import Place, Quantum
from ttlcache.programs.model import Pin, Program, RequestRecord, Work
from ttlcache.programs.table import ProgramTable
from ttlcache.retention.pin_table import PinTable
from ttlcache.scheduling.ordering import Ordering, PriorityKey, QueuedTurn
from ttlcache.scheduling.remaining_work import RemainingWork
from ttlcache.scheduling.wait_bound import WaitBound
from ttlcache.telemetry.events import Telemetry
from ttlcache.types import Rank


@dataclass(slots=True)
class QueueOrder:
    """One ordering, asked about requests that wait.

    requests: those between arrival and finish.
    quantum: service for which a context keeps its place.
    last_started_s: when a turn last got its memory.
    """

    requests: Mapping[str, RequestRecord]
    ordering: Ordering
    quantum: Quantum
    programs: ProgramTable
    pins: PinTable
    work: RemainingWork
    wait_bound: WaitBound
    telemetry: Telemetry
    last_started_s: float = -math.inf

    # --- what an engine adapter asks --------------------------------------

    def priority(self, request_id: str, *, preempted: bool = False) -> PriorityKey:
        """Queue key of a waiting request; smaller is served first.

        Raises:
            KeyError: the request never arrived here.
            TypeError, ValueError: the ordering answered what cannot be sorted.
        """
        record = self.requests[request_id]
        key = self.ordering.key(self._queued(record, preempted))
        return _sortable((record.user_priority, *key))

    def refresh_place(self, request_id: str) -> bool:
        """Whether the request's place is out of date; `priority` answers anew then.

        Asked about the head of the queue: another turn of its context may have used up
        the quantum since it was queued. A place may change once per quantum, no more.
        """
        record = self.requests.get(request_id)
        if record is None or record.admitted_s is not None:
            return False  # what was preempted is in the middle of its turn
        if record.queue_place == record.place.seq:
            return False
        self._read_place(record)
        return True

    def rank(self, record: RequestRecord) -> Rank:
        """As the queue has it: the user's priority goes before the ordering's place."""
        place = self.ordering.rank(self._queued(record, preempted=False))
        return _sortable((record.user_priority, *place))

    def rank_after_this_turn(self, record: RequestRecord) -> Rank:
        """Where the program's next turn will stand, as far as can be told now."""
        self._read_place(record)
        return self.rank(record)

    # --- what the controller says -----------------------------------------

    def on_arrival(self, record: RequestRecord, continuation: Continuation) -> None:
        """The request stands where the context does that it continues.

        One that continues none, or none of a full block, has nothing at stake: it
        stands where a newcomer stands, whatever id or parent it names.
        """
        program, turn = record.program, continuation.turn
        continues = continuation.relation in (Relation.CONTINUES, Relation.DROPS_OUTPUT)
        if continues and turn is not None and turn.num_hashes:
            program.place = turn.place or program.place
        elif program.turns_finished or program.live_requests:
            program.place = self.programs.new_place(program.tenant)
        record.place = program.place
        if self.ordering.uses_work:
            self.programs.place_numbers.update_recent(
                program.tenant, record.queued_s, self.work.run_s.value
            )
        self._read_place(record)

    def on_allocated(self, record: RequestRecord, now_s: float) -> None:
        """The request waits no longer."""
        self.programs.place_numbers.on_allocated(record.queue_place)
        record.place.on_allocated()
        self.last_started_s = now_s
        self.wait_bound.on_allocated(now_s - record.queued_s)

    def on_service(self, record: RequestRecord, seconds: float) -> None:
        """The request ran for so long."""
        self.quantum.on_turn(seconds, is_first=record.place.turns <= 1)
        self._charge(record.place, record.program.tenant, seconds)

    def on_stall(self, pin: Pin) -> None:
        """The engine stood still rather than take the pin."""
        if pin.turn.place is not None:
            self._charge(pin.turn.place, pin.program.tenant, pin.stalled_s)

    def learn_work(
        self, record: RequestRecord, prompt_s: float, outputs: int, now_s: float
    ) -> None:
        """What a turn took of the engine, without waits and repeated prefills."""
        work = self._work_of(record.program, record)
        work.last_s = now_s
        self.work.on_turn_finished(work, prompt_s, outputs)

    def on_program_end(self, program: Program) -> None:
        """The service of its longest context teaches how long a quantum is."""
        place = program.place
        if (not place.turns or place.is_used_up) and not program.live_requests:
            self.programs.place_numbers.give_back(program.tenant, place.seq)
        if program.work is not None:
            self.work.on_program_end(program.work)
        places = [turn.place for turn in program.awaited_turns if turn.place]
        longest = max([program.place, *places], key=lambda place: place.served_s)
        self.quantum.on_program_end(longest)

    # --- inside -------------------------------------------------------------

    def _read_place(self, record: RequestRecord) -> None:
        """Give the request the place of its context as it is now."""
        place = record.place
        record.queue_place = place.seq
        record.claim_counts = not place.is_used_up
        if self.ordering.uses_work:
            # A sub-agent is work of its parent, which waits for it.
            program = record.program.parent or record.program
            work = self._work_of(program, record)
            recent = self.programs.place_numbers.recent(program.tenant)
            record.work_delay_places = self.work.work_delay_places(work, recent)

    def _work_of(self, program: Program, record: RequestRecord) -> Work:
        if program.work is None:
            program.work = Work(record.queued_s)
        return program.work

    def _claims(self, record: RequestRecord) -> bool:
        """Whether it stands among requests with a pin, before those without."""
        return record.claim_counts and self.pins.get(record.pin_id) is not None

    def _charge(self, place: Place, tenant: str, seconds: float) -> None:
        if self.ordering.places_end and place.charge(seconds, self.quantum):
            place.move_back(self.programs.place_numbers.next(tenant))
            self.telemetry.metrics.count("quanta_used_up")

    def _queued(self, record: RequestRecord, preempted: bool) -> QueuedTurn:
        return QueuedTurn(  # by position: names cost half a microsecond here
            preempted,
            self._claims(record),
            record.queue_place,
            record.seq,  # request_seq
            record.work_delay_places,
        )


def _sortable(key: tuple[int, ...]) -> tuple[int, ...]:
    """An ordering may be anybody's code."""
    if any(map(math.isnan, key)):
        raise ValueError(f"key or rank with NaN: {key}")
    return key
