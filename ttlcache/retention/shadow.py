"""Would-be pins of policy `observe`: tables without blocks.

Pins start, expire, give way and are claimed as real ones do, but the engine's blocks
are left alone. What a pin would have saved is what it has of its next turn's prompt,
less what the engine's prefix cache found of it.

The memory that real pins would take has other users here: the engine starts requests
that would have had to wait. Such a request counts as waiting, not as running, while
pins that it does not outrank leave it too little. Pins and the other running requests
never hold more than the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ttlcache.programs.model import Pin, RequestRecord
from ttlcache.retention.pins import PinTable
from ttlcache.retention.reclaim import Reclaimer
from ttlcache.types import (
    BlockHolder,
    Finish,
    Finished,
    PinOutcome,
    Pressure,
    Rank,
    ReleaseMode,
    Shrunk,
)


class ShadowHolder:
    """A `BlockHolder` of hashes in place of blocks; those that pins share count once.

    engine: the holder that real pins would have.
    """

    def __init__(self, engine: BlockHolder, pins: PinTable) -> None:
        self._engine, self._pins = engine, pins
        self._hashes: dict[int, Sequence[bytes]] = {}
        self._refs: Counter[bytes] = Counter()
        self._num_hashes = 0
        self._whole_pins = False
        self._found_tokens = 0
        # Prompt tokens of running requests; of those that should wait.
        self._running: dict[str, int] = {}
        self._waiting: dict[str, int] = {}

    # --- what the controller says ------------------------------------------

    def hold(self, finish: Finish, finished: Finished) -> Finished:
        """Keep a pin's order from the engine."""
        order = finished.order
        if order is None:
            return finished
        self._whole_pins = not finish.divisible
        count = len(finish.hashes) * order.kv_blocks // max(1, finish.kv_blocks)
        hashes = self._hashes[order.pin_id] = finish.hashes[:count]
        self._refs.update(hashes)
        self._num_hashes += len(hashes)
        return finished._replace(order=None)

    def unpinned(self, finish: Finish) -> Finish:
        """With `count_unpinned` as it would be if pins were real."""
        shared = sum(1 for _ in takewhile(self._refs.__contains__, finish.hashes))
        pinned = shared * finish.kv_blocks // max(1, len(finish.hashes))
        return finish._replace(count_unpinned=lambda count: max(0, count - pinned))

    def would_find(self, pin: Pin, record: RequestRecord, cached_tokens: int) -> int:
        """Prompt tokens that the request would find cached if its pin were real."""
        self._found_tokens = cached_tokens
        # The last token is always computed.
        return max(cached_tokens, min(pin.kv_tokens, record.num_tokens - 1))

    def start(self, record: RequestRecord) -> None:
        """The request runs; those that should wait do so while memory lacks."""
        self._waiting.pop(record.request_id, None)
        for request_id, tokens in list(self._waiting.items()):
            del self._waiting[request_id]
            if self.missing_blocks() > 0:
                self._waiting[request_id] = tokens
                break
        self._running[record.request_id] = record.num_tokens

    def keep_waiting(self, record: RequestRecord) -> None:
        """It runs only because pins are not real."""
        self._waiting[record.request_id] = record.num_tokens

    def leave(self, record: RequestRecord) -> None:
        """The request left the engine."""
        self._running.pop(record.request_id, None)
        self._waiting.pop(record.request_id, None)

    def missing_blocks(self) -> int:
        """By how much pins and running requests exceed the pool; below 0: free."""
        return -self._free_blocks(self._engine.pressure())

    # --- BlockHolder -------------------------------------------------------

    def plain_hit_tokens(self, pin_id: int, behind_blocks: int) -> float:
        return self._found_tokens

    def release(self, pin_id: int, outcome: PinOutcome, mode: ReleaseMode) -> int:
        return self._drop(self._hashes.pop(pin_id, ()))

    def shrink(self, pin_id: int, drop_blocks: int, mode: ReleaseMode) -> Shrunk | None:
        pin, hashes = self._pins.get(pin_id), self._hashes.get(pin_id, ())
        keep = 0 if pin is None else pin.kv_blocks - drop_blocks
        if pin is None or self._whole_pins or keep <= 0:
            return None
        count = len(hashes) * keep // pin.kv_blocks
        self._hashes[pin_id] = hashes[:count]
        kept_tokens = pin.kv_tokens * keep // pin.kv_blocks
        return Shrunk(self._drop(hashes[count:]), keep, kept_tokens)

    def is_freeable(self, pin_id: int) -> bool:
        return True

    def count_freeable(self, pin_ids: Iterable[int], enough: int) -> int:
        return enough

    def pressure(self) -> Pressure:
        real, waiting = self._engine.pressure(), len(self._waiting)
        return real._replace(
            free_blocks=max(0, self._free_blocks(real)),
            pinned_blocks=self._pinned_blocks(),
            num_running=max(0, real.num_running - waiting),
            num_waiting=real.num_waiting + waiting,
            wanted_blocks=max(real.wanted_blocks, waiting),
        )

    # --- inside ------------------------------------------------------------

    def _drop(self, hashes: Sequence[bytes]) -> int:
        """How many of them no pin references any more."""
        before = len(self._refs)
        self._num_hashes -= len(hashes)
        for each in hashes:
            self._refs[each] -= 1
            if not self._refs[each]:
                del self._refs[each]
        return before - len(self._refs)

    def _pinned_blocks(self) -> int:
        # Several KV cache groups have more blocks than hashes.
        return self._pins.kv_blocks * len(self._refs) // max(1, self._num_hashes)

    def _free_blocks(self, real: Pressure) -> int:
        used = real.pool_blocks - real.free_blocks
        if self._waiting:
            share = sum(self._waiting.values()) / sum(self._running.values())
            used -= int(used * share)
        return real.pool_blocks - used - self._pinned_blocks()


@dataclass(slots=True)
class ShadowReclaimer(Reclaimer):
    """Takes would-be pins where real ones would have to give way."""

    holder: ShadowHolder

    def reclaim(self, *args: Any, **named: Any) -> int:
        """Nothing: what the engine lacks is not held by pins."""
        return 0

    def on_allocated(
        self,
        record: RequestRecord,
        rank: Rank,
        own_pin_id: int | None,
        redecide: Callable[[], int],
    ) -> None:
        """A request got its blocks: what would that have taken from pins?

        Args:
            rank: where it would stand in the order of `adaptive`.
            own_pin_id: the pin that it claimed.
            redecide: decides pins anew that were made while memory was free.
        """
        shadow, mode = self.holder, ReleaseMode.KEEP_CACHED
        shadow.start(record)
        if shadow.missing_blocks() > 0:
            shadow.keep_waiting(record)
            redecide()
            shadow.start(record)
        if (missing := shadow.missing_blocks()) > 0:
            self._for_waiting(missing, record.program, own_pin_id, rank, mode)
        if shadow.missing_blocks() > 0:
            shadow.keep_waiting(record)
        if (missing := shadow.missing_blocks()) > 0:  # running requests have grown
            self._take(missing, lambda _: True, mode)
