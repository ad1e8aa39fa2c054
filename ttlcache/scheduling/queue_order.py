"""Where requests stand in the queue, and when that changes."""

from __future__ import annotations

from dataclasses import dataclass

from ttlcache.clock import Clock
from ttlcache.programs.model import Attained, Pin, Program, RequestRecord, Work
from ttlcache.programs.places import Place, Quantum
from ttlcache.programs.table import ProgramTable
from ttlcache.retention.pins import PinTable
from ttlcache.scheduling.ordering import Ordering, PriorityKey, QueuedTurn
from ttlcache.scheduling.remaining_work import WorkSizes
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.types import Rank

_NOTHING = Attained()


@dataclass(slots=True)
class Places:
    """One ordering, asked about records of requests.

    ordering: set before the first request, if at all.
    quantum: service for which a context keeps its place.
    """

    ordering: Ordering
    quantum: Quantum
    programs: ProgramTable
    pins: PinTable
    work: WorkSizes
    metrics: MetricsBuffer
    clock: Clock

    def key(self, record: RequestRecord, preempted: bool) -> PriorityKey:
        return self.ordering.key(self._queued(record, preempted))

    def rank(self, record: RequestRecord) -> Rank:
        """As the queue has it: the user's priority goes before the ordering's place."""
        place = self.ordering.rank(self._queued(record, preempted=False))
        return (record.user_priority, *place)

    def rank_of_next(self, record: RequestRecord) -> Rank:
        """Where the program's next turn will stand, as far as can be told now."""
        self.stand(record)
        record.promoted_s = None  # a promotion is for one call
        return self.rank(record)

    def promote_at_s(self, record: RequestRecord) -> float:
        return self.ordering.promote_at_s(self._queued(record, preempted=False))

    def promote(self, record: RequestRecord) -> None:
        record.promoted_s = self.clock.now_s()
        record.program.attained = None

    def stand(self, record: RequestRecord) -> None:
        """Give the request the place of its context as it is now."""
        place = record.place
        record.program_seq = place.seq
        if self.ordering.uses_turns and not record.turn_seq:
            tenant = record.program.tenant
            record.turn_seq = self.programs.place_numbers.next(tenant)
        record.claim_counts = not place.is_used_up
        if self.ordering.uses_work:
            # A sub-agent is work of its parent, which waits for it.
            whose = record.program.parent or record.program
            record.work_left_s = self.work.left_s(whose.work or Work())

    def claims(self, record: RequestRecord) -> bool:
        """Whether it stands among those whose pins are alive, whoever came first."""
        return record.claim_counts and self.pins.get(record.pin_id) is not None

    def stand_back(self, record: RequestRecord) -> bool:
        """Whether its context has moved back since; it has moved with it now."""
        if record.admitted_s is not None:
            return False  # what was preempted is in the middle of its turn
        if record.program_seq == record.place.seq:
            return False
        record.turn_seq = 0  # stands behind who came meanwhile: a new number
        self.stand(record)
        return True

    def admitted(self, record: RequestRecord, now_s: float) -> None:
        """The request waits no longer."""
        since_s = record.queued_s
        if record.promoted_s is not None:
            since_s = record.promoted_s
        if now_s > since_s and self.ordering.uses_service:
            _attained(record.program).wait_s += now_s - since_s
        self.programs.place_numbers.on_admission(
            max(record.program_seq, record.turn_seq)
        )
        record.place.on_admission()

    def on_stall(self, pin: Pin) -> None:
        """The engine stood still rather than take the pin."""
        if pin.turn.place is not None:
            self._use(pin.turn.place, pin.program.tenant, pin.stalled_s)

    def charge(self, record: RequestRecord, seconds: float) -> None:
        """The request ran for so long."""
        if self.ordering.uses_service:
            _attained(record.program).service_s += seconds
        self.quantum.on_turn(seconds)
        self._use(record.place, record.program.tenant, seconds)

    def ended(self, program: Program) -> None:
        """What its longest context was served says how long others may take."""
        places = [turn.place for turn in program.open_turns if turn.place]
        longest = max([program.place, *places], key=lambda place: place.served_s)
        self.quantum.on_program_end(longest)

    def _use(self, place: Place, tenant: str, seconds: float) -> None:
        if self.ordering.places_end and place.charge(seconds, self.quantum.seconds):
            place.move_back(self.programs.place_numbers.next(tenant))
            self.metrics.count("quanta_used_up")

    def _queued(self, record: RequestRecord, preempted: bool) -> QueuedTurn:
        program = record.program
        attained = program.attained or _NOTHING
        return QueuedTurn(  # by position: names cost half a microsecond here
            record.user_priority,
            preempted,
            self.claims(record),
            record.program_seq,
            record.seq,  # request_seq
            record.turn_seq,
            attained.service_s,
            attained.wait_s,
            record.queued_s,
            record.promoted_s is not None,
            record.work_left_s,
        )


def _attained(program: Program) -> Attained:
    if program.attained is None:
        program.attained = Attained()
    return program.attained
