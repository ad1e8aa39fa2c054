"""The pin table: which finished turns are pinned, until when, who goes first.

It owns order, never blocks or bytes. Blocks belong to the engine's pool and are
referenced by the adapter; here a pin is a number of blocks with a deadline.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from sortedcontainers import SortedList

from ttlcache.programs.model import Pin, Program, Turn
from ttlcache.types import Rank


def _order(pin: Pin) -> tuple[int, ...]:
    # By class, and then the latest program first (paper §5.2), as the ordering ranks
    # it: victims are taken from the end.
    return (-pin.priority_class, *pin.rank, pin.pin_id)


class PinTable:
    """All live pins. O(log n) per operation, amortised, but for one memmove.

    Whether a request waits to claim it changes with every turn, so that moves a pin in
    neither order: `expired` and `in_eviction_order` look at the pin itself.
    """

    def __init__(self) -> None:
        self._pins: dict[int, Pin] = {}
        # (deadline, pin id) of those that no request waits to claim.
        self._deadlines: SortedList[tuple[float, int]] = SortedList()
        # Ascending. A plain list: pins are thousands at most, the newest go last.
        self._by_victim: list[tuple[int, ...]] = []
        self._next_id = 0
        self.kv_blocks = 0
        self.client_ttl_blocks = 0  # of pins with `has_client_ttl`
        self.version = 0  # changes with all that lets requests take pins, but time
        self._tenant_blocks: dict[str, int] = {}
        self._uncontended: dict[int, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def get(self, pin_id: int | None) -> Pin | None:
        return None if pin_id is None else self._pins.get(pin_id)

    def add(
        self,
        program: Program,
        turn: Turn,
        *,
        kv_blocks: int,
        kv_tokens: int,
        now_s: float,
        ttl_s: float,
        policy_ttl_s: float = math.inf,
        rank: Rank | None = None,
        stall_wait_s: float = 0.0,
        min_blocks: int = 0,
        uncontended: bool = False,
        yields_to_waiting: bool = False,
    ) -> Pin:
        """Start a pin that expires at `now_s + ttl_s` unless a request will claim it.

        rank: where its program stands; None for its place in the order of arrival,
            at user priority 0.
        yields_to_waiting: see `Pin`.
        """
        self._next_id += 1
        place = turn.place or program.place
        pin = Pin(  # by position: names cost half a microsecond here
            self._next_id,
            program,
            turn,
            kv_blocks,
            kv_tokens,
            now_s,  # created_s
            now_s + ttl_s,  # deadline_s
            program.priority_class,
            (0, place.seq) if rank is None else rank,
            place.is_used_up,  # quantum_used
            now_s + policy_ttl_s,  # policy_deadline_s
            policy_ttl_s < ttl_s,  # has_client_ttl
            now_s + stall_wait_s,  # stall_until_s
            min_blocks,
            uncontended,
            yields_to_waiting,
        )
        if uncontended:
            self._uncontended[pin.pin_id] = None
        turn.pin_id = pin.pin_id
        self._pins[pin.pin_id] = pin
        self._deadlines.add((pin.deadline_s, pin.pin_id))
        insort(self._by_victim, _order(pin))
        self._count(pin, kv_blocks)
        return pin

    def remove(self, pin: Pin) -> None:
        """End a pin; the caller says why, elsewhere."""
        del self._pins[pin.pin_id]
        if not self._pins:
            self._pins = {}  # emptied, the old one keeps the room of its fullest time
        self._deadlines.discard((pin.deadline_s, pin.pin_id))
        self._uncontended.pop(pin.pin_id, None)
        del self._by_victim[bisect_left(self._by_victim, _order(pin))]
        self._count(pin, -pin.kv_blocks)
        pin.turn.pin_id = None
        pin.turn.hashes = ()
        pin.turn.facts = None

    def shrink(self, pin: Pin, *, kv_blocks: int, kv_tokens: int) -> None:
        """Keep only a prefix of the pinned blocks."""
        self._count(pin, kv_blocks - pin.kv_blocks)
        pin.kv_blocks = kv_blocks
        pin.kv_tokens = kv_tokens

    def add_claimant(self, pin: Pin, request_id: str) -> None:
        """The request that will claim this pin waits: stop its expiry."""
        self.version += 1
        pin.claimants.add(request_id)
        self._deadlines.discard((pin.deadline_s, pin.pin_id))

    def remove_claimant(self, pin: Pin, request_id: str) -> None:
        """The request went away without claiming: the deadline counts again."""
        if request_id not in pin.claimants:
            return
        self.version += 1
        pin.claimants.discard(request_id)
        if not pin.has_claimant:
            self._deadlines.add((pin.deadline_s, pin.pin_id))

    def set_deadline(
        self, pin: Pin, deadline_s: float, *, uncontended: bool | None = None
    ) -> None:
        """Decide again. uncontended: None leaves it as it is."""
        self._deadlines.discard((pin.deadline_s, pin.pin_id))
        pin.deadline_s = deadline_s
        if uncontended is not None:
            self._mark(pin, uncontended)
        if not pin.has_claimant:
            self._deadlines.add((pin.deadline_s, pin.pin_id))

    def lower_policy_deadline(self, pin: Pin, deadline_s: float) -> None:
        """Waiting requests may take the pin from then on."""
        if deadline_s < pin.policy_deadline_s:
            pin.policy_deadline_s = deadline_s
            self.version += 1

    def expired(self, now_s: float, most: int | None = None) -> list[Pin]:
        """Pins past their deadline without a claimant, oldest deadline first."""
        due = self._deadlines.irange(maximum=(now_s, self._next_id))
        return [self._pins[pin_id] for _, pin_id in islice(due, most)]

    def pop_uncontended(self, most: int) -> list[Pin]:
        """The oldest uncontended pins, which are so no more.

        Those whose next turn waits are left out: their deadline does not count.
        """
        taken: list[Pin] = []
        while self._uncontended and len(taken) < most:
            pin = self._pins[next(iter(self._uncontended))]
            self._mark(pin, False)
            if not pin.has_claimant:
                taken.append(pin)
        return taken

    def next_deadline_s(self) -> float | None:
        """When the next pin expires, for simulators."""
        return self._deadlines[0][0] if self._deadlines else None

    def in_eviction_order(self) -> Iterator[Pin]:
        """Pins in the order in which memory pressure takes them.

        A pin whose next turn already waits in the queue is about to pay off, so it
        goes after all others. The caller may remove or shrink the pin just yielded,
        no other.
        """
        claimed_soon: list[Pin] = []
        # From the end: what the caller removes moves only pins that were named.
        for index in range(len(self._by_victim) - 1, -1, -1):
            pin = self._pins[self._by_victim[index][-1]]
            if pin.has_claimant:
                claimed_soon.append(pin)
            else:
                yield pin
        yield from claimed_soon

    def is_over_share(self, tenant: str, cap_blocks: int, newcomer: str) -> bool:
        """Whether a tenant's pins exceed an equal part of `cap_blocks`.

        Tenants with pins share, and `newcomer`, that wants some. Blocks that several
        pins share count for each. A tenant that is alone is never over its share.
        """
        held = self._tenant_blocks
        tenants = len(held) + (newcomer not in held)
        return tenants > 1 and held.get(tenant, 0) * tenants > cap_blocks

    def _count(self, pin: Pin, change: int) -> None:
        self.kv_blocks += change
        self.client_ttl_blocks += change if pin.has_client_ttl else 0
        self.version += 1
        tenant = pin.program.tenant
        blocks = self._tenant_blocks.get(tenant, 0) + change
        if blocks:
            self._tenant_blocks[tenant] = blocks
        else:
            self._tenant_blocks.pop(tenant, None)

    def _mark(self, pin: Pin, uncontended: bool) -> None:
        pin.uncontended = uncontended
        self._uncontended.pop(pin.pin_id, None)
        if uncontended:
            self._uncontended[pin.pin_id] = None
