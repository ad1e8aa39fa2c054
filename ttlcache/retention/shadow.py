"""Would-be pins of policy `observe`: they are in the pin table, and hold no block.

They start, expire, are decided anew and claimed as real ones are. What one would have
saved is what it has of its next turn's prompt, less what the engine's prefix cache
found of it. Time alone ends them: in the order of `adaptive`, and under its admission,
programs whose contexts do not fit together would run one after the other, and find
their pins then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ttlcache.retention.pin_table import PinTable
from ttlcache.types import BlockHolder, PinOutcome, Pressure, ReleaseMode, Shrunk


class ShadowHolder:
    """A `BlockHolder` for pins that hold nothing.

    engine: the holder that real pins would have.
    """

    def __init__(self, engine: BlockHolder, pins: PinTable) -> None:
        self._engine, self._pins = engine, pins

    def lacks_memory(self) -> bool:
        """Whether real pins would leave running requests too little."""
        return self._pins.kv_blocks > self._engine.pressure().free_blocks

    # --- BlockHolder -------------------------------------------------------

    def release(self, pin_id: int, outcome: PinOutcome, mode: ReleaseMode) -> int:
        return 0

    def shrink(self, pin_id: int, drop_blocks: int, mode: ReleaseMode) -> Shrunk | None:
        pin = self._pins.get(pin_id)
        keep = 0 if pin is None else pin.kv_blocks - drop_blocks
        if pin is None or keep <= 0:
            return None
        return Shrunk(0, keep, pin.kv_tokens * keep // pin.kv_blocks)

    def is_freeable(self, pin_id: int) -> bool:
        return False

    def count_freeable(self, pin_ids: Iterable[int], enough: int) -> int:
        return 0

    def pressure(self) -> Pressure:
        """With real pins; for each that does not fit, a request would wait."""
        real = self._engine.pressure()
        lacking = self._pins.kv_blocks - real.free_blocks
        if lacking <= 0:
            return real._replace(free_blocks=-lacking)
        too_many = math.ceil(lacking * len(self._pins) / self._pins.kv_blocks)
        return real._replace(
            free_blocks=0,
            num_waiting=real.num_waiting + too_many,
            memory_is_short=True,
        )
