"""Who gets KV memory: may a waiting request start, and which pins give way for it.

What an engine asks when it is about to allocate blocks, and when it could not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ttlcache.clock import Clock
from ttlcache.programs.model import RequestRecord
from ttlcache.retention.awaited_turns import AwaitedTurns
from ttlcache.retention.decisions import Retention
from ttlcache.retention.pin_table import PinTable
from ttlcache.retention.reclaim import Reclaimer
from ttlcache.retention.tier_knowledge import TierKnowledge
from ttlcache.scheduling.admission import AdmissionControl
from ttlcache.scheduling.queue_order import QueueOrder
from ttlcache.types import BlockHolder, PinOutcome, ReleaseMode, Urgency


@dataclass(slots=True)
class MemoryArbiter:
    """Answers for requests by their ids.

    requests: those between arrival and finish.
    block_tokens: tokens per prefix-cache hash.
    """

    requests: Mapping[str, RequestRecord]
    clock: Clock
    holder: BlockHolder
    block_tokens: int
    queue: QueueOrder
    admission: AdmissionControl
    pins: PinTable
    awaited_turns: AwaitedTurns
    retention: Retention
    reclaimer: Reclaimer
    tier_knowledge: TierKnowledge

    def is_newcomer(self, request_id: str) -> bool:
        """Whether a waiting request is of a program that has not started.

        Only such may be held back for others' growth.
        """
        record = self.requests.get(request_id)
        if record is None or record.admitted_s is not None:
            return False
        return self.admission.is_newcomer(record.program)

    def may_start(self, request_id: str, needed_pool_blocks: float) -> bool:
        """Whether a waiting request may take memory now.

        To be asked only while the queue is in this controller's order: in another one
        the head would keep those behind it from memory that they may take.

        Args:
            needed_pool_blocks: beside those that it found cached.
        """
        record = self.requests.get(request_id)
        if record is None or record.admitted_s is not None:
            return True
        if not self.retention.is_enabled:
            return True
        if self.clock.now_s() >= self.admits_all_from_s:
            return True
        return self._missing_blocks(record, needed_pool_blocks) == 0

    @property
    def admits_all_from_s(self) -> float:
        """Until then a newcomer is held back for others' growth.

        No turn has started for as long as a turn takes: what runs are long answers,
        beside which the engine has time for more.
        """
        turns = self.queue.quantum.turn_seconds
        return self.queue.last_started_s + turns.value if turns.count else math.inf

    def may_be_passed(self, request_id: str) -> bool:
        """Whether programs that have started may go before a newcomer held back.

        For one quantum; with several tenants never, as one's would pass another's.
        """
        record = self.requests.get(request_id)
        since_s = None if record is None else record.lacks_memory_since_s
        if since_s is None or not self.is_newcomer(request_id):
            return False
        if self.clock.now_s() - since_s >= self.queue.quantum.seconds:
            return False
        return self.retention.num_tenants() <= 1

    def on_lack_of_memory(self, request_id: str) -> None:
        """A waiting request lacks memory, or room that others are to have."""
        record = self.requests.get(request_id)
        if record is None:
            return
        record.refused_for_growth = False
        if record.lacks_memory_since_s is None:
            record.lacks_memory_since_s = self.clock.now_s()

    def free_for_newcomer(self, request_id: str, needed_pool_blocks: float) -> int:
        """`may_start` said no: pins that have no right to stay give way.

        Returns:
            Blocks that became free, or count as free; 0: asking again is pointless.
        """
        record = self.requests.get(request_id)
        if record is None:
            return 0
        free_blocks = self.holder.pressure().free_blocks
        record.refused_for_growth = needed_pool_blocks <= free_blocks
        self.redecide_under_pressure()
        missing = self._missing_blocks(record, needed_pool_blocks)
        self.reclaimer.take_for_newcomer(record.program, missing)
        return self.holder.pressure().free_blocks - free_blocks

    def redecide_under_pressure(self) -> int:
        """A request waits for memory: pins made while nobody did are decided anew.

        Returns:
            Blocks that became free.
        """
        return self.retention.redecide_under_pressure(self.clock.now_s())

    def reclaim(
        self,
        needed_blocks: int,
        urgency: Urgency,
        request_id: str,
        *,
        patient: bool = True,
        mode: ReleaseMode = ReleaseMode.FREE_NOW,
    ) -> int:
        """Blocks freed from pins for a request that failed to get memory.

        patient: whether a stalled engine may wait for pins' next turns, as their policy
            asks; not once the request is overdue.
        mode: with `COPY_FIRST` they count as free although they are only soon.
        """
        record = self.requests.get(request_id)
        return self.reclaimer.reclaim(
            max(1, needed_blocks),
            urgency,
            record.program if record else None,
            record.pin_id if record else None,
            self.queue.rank(record) if record else (),
            patient=patient,
            mode=mode,
        )

    def release_all(self) -> None:
        """Prefix-cache reset, sleep, shutdown: every pin goes."""
        for pin in list(self.pins):
            self.awaited_turns.end_pin(pin, PinOutcome.RESET)
        self.tier_knowledge.on_new_generation()  # what was not copied yet never will be

    def _missing_blocks(self, record: RequestRecord, needed_pool_blocks: float) -> int:
        """How many more free pool blocks would let the request start."""
        missing = self.admission.missing_blocks(
            record.program,
            needed_pool_blocks,
            record.num_tokens / self.block_tokens,
            self.holder.pressure(),
        )
        return max(0, math.ceil(missing))
