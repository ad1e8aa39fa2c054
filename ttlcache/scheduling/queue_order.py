"""Where requests stand in the queue, and when that changes."""

from __future__ import annotations

from dataclasses import dataclass

from ttlcache.programs.model import Pin, Program, RequestRecord, Work
from ttlcache.programs.places import Place, Quantum
from ttlcache.programs.table import ProgramTable
from ttlcache.retention.pins import PinTable
from ttlcache.scheduling.ordering import Ordering, PriorityKey, QueuedTurn
from ttlcache.scheduling.remaining_work import RemainingWork
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.types import Rank


@dataclass(slots=True)
class QueueOrder:
    """One ordering, asked about records of requests.

    quantum: service for which a context keeps its place.
    """

    ordering: Ordering
    quantum: Quantum
    programs: ProgramTable
    pins: PinTable
    work: RemainingWork
    metrics: MetricsBuffer

    def key(self, record: RequestRecord, preempted: bool) -> PriorityKey:
        return self.ordering.key(self._queued(record, preempted))

    def rank(self, record: RequestRecord) -> Rank:
        """As the queue has it: the user's priority goes before the ordering's place."""
        place = self.ordering.rank(self._queued(record, preempted=False))
        return (record.user_priority, *place)

    def rank_after_this_turn(self, record: RequestRecord) -> Rank:
        """Where the program's next turn will stand, as far as can be told now."""
        self.assign_place(record)
        return self.rank(record)

    def assign_place(self, record: RequestRecord) -> None:
        """Give the request the place of its context as it is now."""
        place = record.place
        record.program_seq = place.seq
        if self.ordering.uses_turns and not record.turn_seq:
            tenant = record.program.tenant
            record.turn_seq = self.programs.place_numbers.next(tenant)
        record.claim_counts = not place.is_used_up
        if self.ordering.uses_work:
            # A sub-agent is work of its parent, which waits for it.
            program = record.program.parent or record.program
            record.work_left_s = self.work.left_s(program.work or Work())

    def claims(self, record: RequestRecord) -> bool:
        """Whether it stands among requests with a pin, before those without."""
        return record.claim_counts and self.pins.get(record.pin_id) is not None

    def requeue_if_moved(self, record: RequestRecord) -> bool:
        """Whether its context has moved back since; the request has moved with it now.

        Another turn of the context may have used up the quantum meanwhile.
        """
        if record.admitted_s is not None:
            return False  # what was preempted is in the middle of its turn
        if record.program_seq == record.place.seq:
            return False
        record.turn_seq = 0  # behind requests that came meanwhile: a new number
        self.assign_place(record)
        return True

    def on_admission(self, record: RequestRecord) -> None:
        """The request waits no longer."""
        number = max(record.program_seq, record.turn_seq)
        self.programs.place_numbers.on_admission(number)
        record.place.on_admission()

    def on_stall(self, pin: Pin) -> None:
        """The engine stood still rather than take the pin."""
        if pin.turn.place is not None:
            self._use(pin.turn.place, pin.program.tenant, pin.stalled_s)

    def charge(self, record: RequestRecord, seconds: float) -> None:
        """The request ran for so long."""
        self.quantum.on_turn(seconds)
        self._use(record.place, record.program.tenant, seconds)

    def on_program_end(self, program: Program) -> None:
        """The service of its longest context teaches how long a quantum is."""
        places = [turn.place for turn in program.open_turns if turn.place]
        longest = max([program.place, *places], key=lambda place: place.served_s)
        self.quantum.on_program_end(longest)

    def _use(self, place: Place, tenant: str, seconds: float) -> None:
        if self.ordering.places_end and place.charge(seconds, self.quantum.seconds):
            place.move_back(self.programs.place_numbers.next(tenant))
            self.metrics.count("quanta_used_up")

    def _queued(self, record: RequestRecord, preempted: bool) -> QueuedTurn:
        return QueuedTurn(  # by position: names cost half a microsecond here
            record.user_priority,
            preempted,
            self.claims(record),
            record.program_seq,
            record.seq,  # request_seq
            record.turn_seq,
            record.work_left_s,
        )
