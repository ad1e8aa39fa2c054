"""How references end other than by the life of requests: resets, faults, the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ttlcache_connector.blocks.pinned import free_tail_first
from ttlcache_connector.faults import guarded

if TYPE_CHECKING:
    from ttlcache.controller import Controller
    from ttlcache_connector.blocks.pinned import PinnedBlocks
    from ttlcache_connector.role.parts import Parts


def turn_off(controller: Controller, holder: PinnedBlocks) -> None:
    """No retention any more for this server; every reference goes."""
    try:
        controller.disable()
    finally:
        holder.drop_all()


class Teardown:
    """Lets everything go, also what a failing table has lost."""

    def __init__(self, parts: Parts) -> None:
        self._controller = parts.controller
        self._holder, self._above_tier = parts.holder, parts.above_tier
        self._lower = parts.lower
        self.faults = parts.faults

    def release_all(self) -> None:
        """Every reference goes."""
        self.release_pins()
        self.drop_rest()

    def clear_own_tier(self) -> bool:
        """Clears a tier that no other engine uses; whether that worked."""
        tier = self._lower.tier
        return tier.is_shared or self._lower.call(tier.reset, False)

    @guarded()
    def release_pins(self) -> None:
        """Every pin that the controller knows."""
        self._controller.memory.release_all()
        if self._above_tier is not None:
            self._above_tier.unpinned.drop_all()

    @guarded(fallback=0)
    def drop_rest(self) -> int:
        """Blocks freed by giving back whatever is still referenced, unasked."""
        return self._holder.drop_all()

    @guarded(fallback=0)
    def drop_orphans(self) -> int:
        """Blocks freed from pins that a fault has left to the holder alone.

        It came between the pin table and the holder; they are freed at the latest when
        a request needs them.
        """
        known = {pin.pin_id for pin in self._controller.pins}
        holder = self._holder
        lost = [pin_id for pin_id in holder.blocks_by_pin if pin_id not in known]
        return sum(free_tail_first(holder.pool, holder.detach(i)) for i in lost)

    @guarded()
    def release_if_off(self) -> None:
        """Retention is off, but turning off has failed half-way: once more."""
        if self._controller.retention_enabled:
            return
        above_tier = self._above_tier
        unpinned = above_tier is not None and above_tier.unpinned
        if self._controller.pins or self._holder.blocks_by_pin or unpinned:
            turn_off(self._controller, self._holder)

    def reset(self) -> bool:
        """The prefix cache is reset, above and below; whether that worked."""
        self.release_all()
        return self._lower.call(self._lower.tier.reset, False)

    @guarded()
    def shutdown(self) -> None:
        """The engine stops: release everything, end the recording."""
        self.release_all()
        self._controller.telemetry.close()
        self._lower.call(self._lower.tier.shutdown, None)
