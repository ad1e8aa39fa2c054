"""Which waiting requests may take memory: asks the admission control."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ttlcache.clock import Clock
from ttlcache.config import PROGRAM_ORDERINGS
from ttlcache.programs.model import RequestRecord
from ttlcache.scheduling.admission import AdmissionControl
from ttlcache.scheduling.queue_order import Places
from ttlcache.types import Admission, BlockHolder


@dataclass(slots=True)
class Entrance:
    """Answers for requests that were not given memory yet."""

    control: AdmissionControl
    places: Places
    holder: BlockHolder
    clock: Clock
    block_tokens: int

    def ask(
        self, record: RequestRecord, kv_blocks: float, *, by_program: bool
    ) -> Admission:
        """by_program: whether the queue stands in the controller's order."""
        now_s, pressure = self.clock.now_s(), self.holder.pressure()
        by_program = by_program and self.places.ordering.name in PROGRAM_ORDERINGS
        if self.control.needs_order and not by_program:
            return Admission.ADMIT
        return self.control.admit(
            record.program,
            kv_blocks,
            pressure,
            now_s,
            context_blocks=record.num_tokens / self.block_tokens,
        )

    def lack_blocks(self, record: RequestRecord, kv_blocks: float) -> int:
        """How many more free blocks would let it in, see `AdmissionControl`."""
        context_blocks = record.num_tokens / self.block_tokens
        lack = self.control.lack_blocks(
            record.program, kv_blocks, context_blocks, self.holder.pressure()
        )
        return max(0, math.ceil(lack))
