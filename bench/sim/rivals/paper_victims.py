"""Who gives way under memory pressure in the paper's own words (CacheTTL v4 §5.2).

When a new request finds no room, pins end, that of the latest program first, until it
fits. Nothing is said of whose request it is, so a newcomer's may end everybody's, and
pins end as a whole. Our engine takes only pins of programs after the request's own,
and their blocks one by one: arm `cachettl` has the paper's TTLs under our rule, our cap
and our bounds on waiting, arm `cachettl-paper` under this rule and without those. Of
running requests the paper says nothing; they take pins as ours do. The pin that the
request itself will claim is spared while anything runs.
"""

from __future__ import annotations

from typing import ClassVar

from ttlcache.programs.model import Pin, Program
from ttlcache.retention.reclaim import Reclaimer
from ttlcache.types import PinOutcome, Rank, ReleaseMode, Urgency
from ttlcache_connector.connector import TTLConnector
from ttlcache_sim.gates import Gate, controller_of
from ttlcache_sim.settings import Cell


class PaperReclaimer(Reclaimer):
    """Ends whole pins for whatever request lacks memory.

    urgencies: of requests that may end any; those that run take what they need.
    """

    urgencies: ClassVar[frozenset[Urgency]] = frozenset(Urgency)

    def reclaim(
        self,
        needed_blocks: int,
        urgency: Urgency,
        program: Program | None,
        own_pin_id: int | None,
        rank: Rank = (0, 0),
        *,
        patient: bool = True,
        mode: ReleaseMode = ReleaseMode.FREE_NOW,
    ) -> int:
        if urgency not in self.urgencies:
            return 0
        if urgency is Urgency.RUNNING:
            return super().reclaim(
                needed_blocks, urgency, program, own_pin_id, rank, mode=mode
            )
        freed = 0
        for pin in sorted(self.pins, key=_latest_first):
            if freed >= needed_blocks:
                break
            if pin.pin_id != own_pin_id:  # to end that one gains nothing
                freed += self.turns.end_pin(pin, PinOutcome.VICTIM)
        own = self.pins.get(own_pin_id)
        if not freed and own is not None and urgency is Urgency.STALLED:
            freed = self.turns.end_pin(own, PinOutcome.VICTIM)
        return freed


def gate(cell: Cell, connector: TTLConnector | None) -> Gate:
    """Holds nobody; from now on pins of this engine give way like that."""
    replace_reclaimer(connector, PaperReclaimer)
    return Gate()


def replace_reclaimer(
    connector: TTLConnector | None, reclaimer: type[Reclaimer]
) -> None:
    """Which pins give way is for `reclaimer` to say from now on."""
    memory = controller_of(connector).memory
    ours = memory.reclaimer
    memory.reclaimer = reclaimer(
        ours.pins,
        ours.holder,
        ours.turns,
        ours.clock,
        ours.max_pinned_fraction,
    )


def _latest_first(pin: Pin) -> tuple[int, ...]:
    return (*(-place for place in pin.rank), -pin.pin_id)
