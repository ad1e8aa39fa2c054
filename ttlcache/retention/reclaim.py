"""Memory pressure: which pins give way, and for whom.

Decode of a running request outranks every pin. A waiting request may take pins
that stand behind it in the order of the queue, so that pins never turn it around, and
pins beyond the TTL that their policy gave, and those of its tenant that yield (above a
lower tier, `Decision.yields_to_waiting`). A pin whose own turn waits gives way to
requests that have a pin, too: if each held its memory and waited for the rest, they
would run one at a time. Where several tenants hold pins, a tenant over its equal part
of the cap may take from itself only, and gives way to running requests first: a flood
of pins hurts the one who sends it. When nothing runs, everything goes until the head
of the queue fits: no pin may ever wedge the engine (paper §5.2, latest program first).
A policy may ask a stalled engine to wait (`Decision.stall_wait_s`): an instant without
work, while tools of a second run, is no reason to lose contexts that take many seconds
to rebuild.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from ttlcache.clock import Clock
from ttlcache.programs.model import Pin, Program
from ttlcache.retention.awaited_turns import AwaitedTurns
from ttlcache.retention.pin_table import PinTable
from ttlcache.types import BlockHolder, PinOutcome, Rank, ReleaseMode, Urgency

Eligible = Callable[[Pin], bool]


#: A rank that no pin stands behind.
_BEHIND_ALL: Rank = (sys.maxsize,)


@dataclass(slots=True)
class Reclaimer:
    """Takes memory back from pins: in `PinTable`'s order, of one pin the tail first.

    A waiting request may take pins of a larger rank, those past their policy's
    deadline, those of tenants over their share, and those of its own tenant that yield;
    a running one any.
    """

    pins: PinTable
    holder: BlockHolder
    turns: AwaitedTurns
    clock: Clock
    max_pinned_fraction: float = 1.0
    # What was asked for in vain, and how many blocks: as long as nothing changes more
    # is in vain, too. A blocked head of the queue asks at every step.
    _vain: tuple[object, ...] = field(default=(), init=False)
    _vain_blocks: int = field(default=0, init=False)

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
        """Free at least `needed_blocks` if that is possible and allowed.

        Args:
            needed_blocks: how many more free blocks are wanted, at least 1.
            program: whose request wants them; None: a waiting one gets nothing.
            own_pin_id: the pin that this request will claim: taking it gains
                nothing, so it goes only when the engine is stalled.
            rank: where the request stands, in the ordering's own terms.
            patient: whether a stalled engine may wait for pins' next turns.
            mode: how the blocks are released.

        Returns:
            Blocks that became free, or will be once they are copied; 0 means that
            asking again is pointless.
        """
        if urgency is Urgency.WAITING:
            return self._for_waiting(needed_blocks, program, own_pin_id, rank, mode)
        tenant = "" if program is None else program.tenant
        if urgency is Urgency.WAITING_ANY_PIN:
            return self._unless_in_vain(
                (own_pin_id,), needed_blocks, lambda pin: pin.pin_id != own_pin_id, mode
            )
        cap = self._cap()

        def useful(pin: Pin) -> bool:
            return pin.pin_id != own_pin_id and self.holder.is_freeable(pin.pin_id)

        def over_share(pin: Pin) -> bool:
            over = self.pins.is_over_share(pin.program.tenant, cap, tenant)
            return over and useful(pin)

        if urgency is Urgency.STALLED and patient:
            awaited = self._pins_to_await(own_pin_id)
            if awaited:
                freed = self._if_it_helps(
                    needed_blocks,
                    lambda pin: useful(pin) and not self._waits_for(pin),
                    mode,
                )
                if not freed:
                    self._note_stall(awaited)
                return freed
        freed = self._take(needed_blocks, over_share, mode)
        if freed < needed_blocks:
            freed += self._take(needed_blocks - freed, useful, mode)
        if freed < needed_blocks and urgency is Urgency.STALLED:
            freed += self._take(needed_blocks - freed, lambda _: True, mode)
        return freed

    def make_room_for_pin(
        self, program: Program, rank: Rank, blocks: int, *, some_help: bool
    ) -> None:
        """Un-reference about `blocks` blocks of others' pins for one of `program`.

        Pins that a request awaits stay.

        some_help: whether fewer are of use, too; otherwise it is all or nothing.
        """
        cap, now_s = self._cap(), self.clock.now_s()

        def eligible(pin: Pin) -> bool:
            return not pin.has_claimant and self._outranks(
                program, rank, pin, cap, now_s
            )

        if not some_help:
            offered = sum(
                p.kv_blocks for p in self.pins.in_eviction_order() if eligible(p)
            )
            if offered < blocks:
                return
        left = self.pins.kv_blocks - blocks
        for pin in self.pins.in_eviction_order():
            if self.pins.kv_blocks <= left:
                return
            if eligible(pin):
                too_many = self.pins.kv_blocks - left
                self._shrink(pin, too_many, ReleaseMode.KEEP_CACHED)

    def trim_client_ttls(self, most_blocks: int) -> None:
        """End pins beyond their policy's TTL while client TTLs hold too much.

        One of them may cross the line, as when they are granted.
        """
        now_s = self.clock.now_s()
        for pin in self.pins.in_eviction_order():
            if self.pins.client_ttl_blocks <= most_blocks:
                return
            needless = self.pins.client_ttl_blocks - pin.kv_blocks >= most_blocks
            lapsed = (
                pin.has_client_ttl
                and not pin.has_claimant
                and now_s >= pin.policy_deadline_s
            )
            if needless and lapsed:
                self.turns.end_pin(pin, PinOutcome.VICTIM)

    def take_for_newcomer(self, program: Program, blocks: int) -> None:
        """Free up to `blocks` of pins that have no right against anybody.

        Those beyond their policy's TTL, and those of a tenant over its part.
        What else ranks behind the newcomer is not taken for growth that is to come.
        """
        cap, now_s = self._cap(), self.clock.now_s()
        enough = self.holder.pressure().free_blocks + blocks
        self._take(
            blocks,
            lambda pin: (
                not pin.has_claimant
                # Above a tier the pins taken so far are kept, and count as free.
                and self.holder.pressure().free_blocks < enough
                and self._outranks(program, _BEHIND_ALL, pin, cap, now_s)
                and self.holder.is_freeable(pin.pin_id)
            ),
            ReleaseMode.KEEP_CACHED,
        )

    def _for_waiting(
        self,
        needed: int,
        program: Program | None,
        own_pin_id: int | None,
        rank: Rank,
        mode: ReleaseMode,
    ) -> int:
        if program is None:
            return 0
        cap, now_s = self._cap(), self.clock.now_s()

        def eligible(pin: Pin) -> bool:
            # A waiting turn's pin is safe from requests without a pin, unless those
            # have a higher user priority. (A preempted turn has already claimed.)
            is_claim = pin.has_claimant and not pin.quantum_used
            is_claim = is_claim and pin.rank[0] <= rank[0]
            if pin.pin_id == own_pin_id or (is_claim and own_pin_id is None):
                return False
            yields = pin.yields_to_waiting and not pin.has_claimant
            if yields and pin.program.tenant == program.tenant:
                return True
            return self._outranks(program, rank, pin, cap, now_s)

        return self._unless_in_vain(
            (program.tenant, rank, own_pin_id), needed, eligible, mode
        )

    def _unless_in_vain(
        self,
        asked: tuple[object, ...],
        needed: int,
        eligible: Eligible,
        mode: ReleaseMode,
    ) -> int:
        # Policy TTLs end without a new version of the table: so the second, too.
        asked = (*asked, self.pins.version, int(self.clock.now_s()))
        if asked == self._vain and needed >= self._vain_blocks:
            return 0
        freed = self._if_it_helps(needed, eligible, mode)
        self._vain, self._vain_blocks = () if freed else asked, needed
        return freed

    def _if_it_helps(self, needed: int, eligible: Eligible, mode: ReleaseMode) -> int:
        """Take pins only if they can be enough: anything less would be waste."""
        if self.pins.kv_blocks < needed:
            return 0
        offered = 0
        for pin in self.pins.in_eviction_order():
            if eligible(pin):
                offered += pin.kv_blocks
                if offered >= needed:
                    break
        else:
            return 0
        # Many pins may hold the same prompt, and running requests use it. Asked last:
        # the holder walks over blocks.
        pin_ids = (pin.pin_id for pin in self.pins.in_eviction_order() if eligible(pin))
        if self.holder.count_freeable(pin_ids, needed) < needed:
            return 0
        return self._take(
            needed,
            lambda pin: eligible(pin) and self.holder.is_freeable(pin.pin_id),
            mode,
        )

    def _outranks(
        self, program: Program, rank: Rank, pin: Pin, cap_blocks: int, now_s: float
    ) -> bool:
        """Whether what `program` wants is worth more than `pin`.

        A pin with a claimant has no deadline; of equal rank it gives way, as its
        claimant stands behind the head of the queue, which asks.
        """
        if pin.has_claimant:
            weaker = pin.rank >= rank
        else:
            weaker = pin.rank > rank or now_s >= pin.policy_deadline_s
        mine, theirs = program.tenant, pin.program.tenant
        if mine == theirs:
            return weaker
        if self.pins.is_over_share(mine, cap_blocks, mine):
            return False
        return weaker or self.pins.is_over_share(theirs, cap_blocks, mine)

    def _waits_for(self, pin: Pin) -> bool:
        """Whether a stalled engine waits for the pin's next turn rather than take it.

        Ski rental: until the wait has cost as much as rebuilding the context would.
        Once that turn is in the queue there is nothing to wait for.
        """
        if pin.has_claimant or pin.quantum_used:
            return False
        now_s = self.clock.now_s()
        # A clock that went back must not prolong it.
        return pin.created_s <= now_s < min(pin.stall_until_s, pin.policy_deadline_s)

    def _pins_to_await(self, own_pin_id: int | None) -> list[Pin]:
        return [p for p in self.pins if p.pin_id != own_pin_id and self._waits_for(p)]

    def _note_stall(self, awaited: list[Pin]) -> None:
        """The engine waits: that counts as service of the programs it waits for."""
        now_s = self.clock.now_s()
        for pin in awaited:
            if pin.stalled_from_s is None:
                pin.stalled_from_s = now_s
            pin.stalled_until_s = now_s

    def _cap(self) -> int:
        return int(self.max_pinned_fraction * self.holder.pressure().pool_blocks)

    def _take(self, needed: int, eligible: Eligible, mode: ReleaseMode) -> int:
        """Shrink eligible pins until enough is free or nothing of them is left.

        One round may free too little: a pin frees nothing before those that go on
        from its last block. Every round drops references, so the rounds end.
        """
        freed = 0
        while freed < needed:
            referenced = self.pins.kv_blocks
            freed += self._take_round(needed - freed, eligible, mode)
            if self.pins.kv_blocks == referenced:
                break
        return freed

    def _take_round(self, needed: int, eligible: Eligible, mode: ReleaseMode) -> int:
        freed = 0
        for pin in self.pins.in_eviction_order():
            if freed >= needed:
                break
            if eligible(pin):
                freed += self._shrink(pin, needed - freed, mode)
        return freed

    def _shrink(self, pin: Pin, drop_blocks: int, mode: ReleaseMode) -> int:
        if pin.kv_blocks - drop_blocks < max(1, pin.min_blocks):
            return self.turns.end_pin(pin, PinOutcome.VICTIM, mode)
        return self.turns.shrink_pin(pin, drop_blocks, PinOutcome.VICTIM, mode)
