"""What is left when the parts that usually let pins go have failed themselves.

An exception between the pin table and its holder leaves references behind that no
table knows. They are freed at the latest when a request needs them.
"""

from __future__ import annotations

from ttlcache.controller import Controller
from ttlcache_connector.blocks.pinned import PinnedBlocks, free_tail_first

#: A finished turn that takes longer than this in our hooks is slow; so many in a row
#: turn retention off. A policy may be third-party code, and the engine waits for it.
SLOW_FINISH_S = 0.5
MAX_SLOW_IN_A_ROW = 3


class SlowTurns:
    """Watches how long the engine waits for our decisions.

    One slow decision may be the machine's fault; several in a row are ours.
    """

    def __init__(self) -> None:
        self._slow_in_a_row = 0

    def is_lost(self, finish_s: float) -> bool:
        """Whether it is time to give up; `finish_s` is what a turn just took."""
        self._slow_in_a_row = self._slow_in_a_row + 1 if finish_s > SLOW_FINISH_S else 0
        if self._slow_in_a_row < MAX_SLOW_IN_A_ROW:
            return False
        self._slow_in_a_row = 0
        return True


def drop_orphans(controller: Controller, pins: PinnedBlocks) -> int:
    """Blocks freed by giving back references of pins that the table has lost."""
    known = {pin.pin_id for pin in controller.pins}
    lost = [pin_id for pin_id in pins.held if pin_id not in known]
    return sum(free_tail_first(pins.pool, pins.hand_over(pin_id)) for pin_id in lost)
