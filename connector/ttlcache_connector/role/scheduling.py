"""What vLLM's scheduler asks: its queue's order, and who may take whose memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from ttlcache.types import Admission, ReleaseMode, Urgency
from ttlcache_connector.blocks.pinned import usable_blocks
from ttlcache_connector.faults import guarded
from ttlcache_connector.queue import HoldScope

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ttlcache_connector.blocks.unpinned_turns import UnpinnedTurns
    from ttlcache_connector.connector import TTLConnector
    from ttlcache_connector.role.allocate_slots import Group
    from ttlcache_connector.role.parts import Parts
    from ttlcache_connector.role.teardown import Teardown


#: Seconds for which a count of the blocks that only ended turns hold is good.
COUNTED_EVERY_S = 5.0


class SchedulingCallbacks:
    """Fail open: what is broken goes by arrival, admits, and wedges no engine."""

    def __init__(self, parts: Parts, teardown: Teardown, groups: list[Group]) -> None:
        self._parts, self._teardown, self._groups = parts, teardown, groups
        self._controller, self._holder = parts.controller, parts.holder
        self._above_tier, self._engine = parts.above_tier, parts.engine
        self.faults = parts.faults
        self._counted_share, self._counted_s = 0.0, -math.inf

    # --- order -----------------------------------------------------------

    def priority(self, request: Request) -> tuple[int, ...]:
        """See `TTLConnector.priority`."""
        preempted = request.status is RequestStatus.PREEMPTED
        self._engine.asked_order = True
        try:
            return self._controller.queue.priority(
                request.request_id, preempted=preempted
            )
        except KeyError:
            pass  # its arrival failed and was counted: last, in order of time
        except Exception:  # noqa: BLE001 - the serving path fails open
            self.faults.record("priority")
        return by_arrival(request, self._engine.user_priority(request))

    @guarded(fallback=False)
    def refresh_place(self, request: Request) -> bool:
        """Whether the head of the queue must be sorted in anew."""
        return self._controller.queue.refresh_place(request.request_id)

    @guarded()
    def queued_s(self, request: Request) -> float | None:
        """See `TTLConnector.queued_s`."""
        record = self._controller.requests.get(request.request_id)
        return None if record is None else record.queued_s

    @guarded(fallback=math.inf)
    def max_wait_s(self, newcomers: int = 0) -> float:
        """See `TTLConnector.max_wait_s`."""
        bound = self._controller.queue.wait_bound
        return bound.seconds(newcomers, self._may_learn_wait)

    def _may_learn_wait(self) -> bool:
        """Where tenants share, or clients say who goes first, a flood must not pass."""
        one_tenant = self._controller.retention.num_tenants() <= 1
        return one_tenant and self._engine.by_program

    @guarded()
    def on_overdue(self) -> None:
        """A request reached the bound on waiting."""
        self._parts.count("overdue_requests")

    # --- memory ----------------------------------------------------------

    @guarded(fallback=0.0)
    def retained_share(self) -> float:
        """See `TTLConnector.retained_share`."""
        holder, pool = self._holder, self._holder.pool
        usable = usable_blocks(pool)
        if holder.memory_is_short:  # a request waits, and pins do not give way
            return 0.0
        if not (any(self._engine.queue_counts()) or any(self._parts.prefills)):
            return 1.0 - pool.get_num_free_blocks() / usable
        now_s = self._parts.clock.now_s()
        if now_s - self._counted_s >= COUNTED_EVERY_S:  # O(blocks)
            refs = holder.references().items()
            alone = sum(pool.blocks[i].ref_cnt == n for i, n in refs)
            self._counted_share, self._counted_s = alone / usable, now_s
        return self._counted_share

    @guarded(fallback=Admission.ADMIT)
    def admission(self, request: Request, needed_blocks: int) -> Admission:
        """See `TTLConnector.admission`."""
        if self._controller.memory.may_start(request.request_id, needed_blocks):
            return Admission.ADMIT
        return Admission.WAIT

    @guarded(fallback=False)
    def is_newcomer(self, request: Request) -> bool:
        """See `TTLConnector.is_newcomer`."""
        return self._controller.memory.is_newcomer(request.request_id)

    @guarded(fallback=False)
    def holds_back(self, ask: TTLConnector, request: Request, hit_tokens: int) -> bool:
        """Whether admission control keeps the head of our queue out of this step.

        All newcomers wait then. Others pass for a quantum if it is only the growth of
        programs that lacks room; where the request itself does not fit, none may.

        Args:
            ask: the connector, whose class may answer in its own way.
        """
        engine = self._engine
        if not engine.by_program:
            return False  # what is held back at the head would keep others waiting
        if request.skip_reading_prefix_cache or engine.is_overdue(request):
            return False  # vLLM takes no such answer for it; it has waited long enough
        if not engine.num_running() and not self._parts.prefills.is_loading():
            return False
        tokens = request.num_tokens - hit_tokens
        needed = int(sum(min(g.blocks(tokens), g.most_blocks) for g in self._groups))
        if ask.admission(request, needed) is Admission.ADMIT:
            return False
        # Pins that have no right to stay give way for it, too.
        freed = ask.eviction(needed, request, Urgency.HELD_BACK)
        if freed and ask.admission(request, needed) is Admission.ADMIT:
            return False
        fits = needed <= self._holder.pressure().free_blocks
        others_pass = fits and self._controller.memory.may_be_passed(request.request_id)
        engine.hold_back(HoldScope.NEWCOMERS if others_pass else HoldScope.ALL)
        return True

    def eviction(self, needed_blocks: int, request: Request, urgency: Urgency) -> int:
        """See `TTLConnector.eviction`."""
        try:
            return self._evict(needed_blocks, request, urgency)
        except Exception:  # noqa: BLE001 - the serving path fails open
            self.faults.record("eviction")
        # A broken reclaimer must not wedge an engine in which nothing runs.
        return self._teardown.drop_rest() if urgency is Urgency.STALLED else 0

    def _evict(self, needed_blocks: int, request: Request, urgency: Urgency) -> int:
        if urgency is Urgency.RUNNING:
            return self._evict_for_running(needed_blocks, request)
        memory, freed = self._controller.memory, 0
        self._holder.memory_is_short = True
        memory.on_lack_of_memory(request.request_id)
        if urgency is Urgency.HELD_BACK:
            return memory.free_for_newcomer(request.request_id, needed_blocks)
        if urgency is not Urgency.STALLED:  # it takes any pin below
            freed = memory.redecide_under_pressure()
        above_tier, lack = self._above_tier, needed_blocks - freed
        if above_tier is not None and self._parts.lower.is_up():
            return freed + self._evict_to_tier(
                above_tier.unpinned, lack, request, urgency
            )
        return freed + self._evict_now(lack, request, urgency)

    def _evict_for_running(self, needed_blocks: int, request: Request) -> int:
        freed = self._evict_now(needed_blocks, request, Urgency.RUNNING)
        if freed < needed_blocks:
            # vLLM would preempt a request: that costs more than a copy.
            lower, lack = self._parts.lower, needed_blocks - freed
            freed += lower.call(lower.tier.demotions.drop_copies, 0, lack)
        return freed

    def _evict_now(self, needed_blocks: int, request: Request, urgency: Urgency) -> int:
        """Wait for no copy: a running request cannot, nor for a tier that is down."""
        freed = 0
        if self._above_tier is not None:
            freed = self._above_tier.unpinned.free(needed_blocks, at_once=True)
        if freed < needed_blocks:
            freed += self._reclaim(needed_blocks - freed, request, urgency)
        if freed < needed_blocks and self._above_tier is not None:
            lack = needed_blocks - freed  # pins held some of theirs, too
            freed += self._above_tier.unpinned.free(lack, at_once=True)
        return freed

    def _evict_to_tier(
        self,
        unpinned: UnpinnedTurns,
        needed_blocks: int,
        request: Request,
        urgency: Urgency,
    ) -> int:
        """A request in the queue can wait for a copy; a prefill takes far longer."""
        pool = self._holder.pool
        before = pool.get_num_free_blocks()
        unpinned.free(needed_blocks, at_once=False)
        freed = pool.get_num_free_blocks() - before
        lack = needed_blocks - freed - unpinned.soon_free()
        if lack > 0:
            self._reclaim(lack, request, urgency, ReleaseMode.COPY_FIRST)
        freed = int(pool.get_num_free_blocks() - before)
        return freed if freed >= needed_blocks or not unpinned.soon_free() else 0

    def _reclaim(
        self,
        blocks: int,
        request: Request,
        urgency: Urgency,
        mode: ReleaseMode = ReleaseMode.FREE_NOW,
    ) -> int:
        # What holds blocks is at the head: no turn that a pin waits for can pass it.
        patient = not (request.num_computed_tokens or self._engine.is_overdue(request))
        freed = self._controller.memory.reclaim(
            blocks, urgency, request.request_id, patient=patient, mode=mode
        )
        if not freed and urgency is Urgency.STALLED:
            # Nothing runs, nothing frees: what a fault left behind goes, too.
            return self._teardown.drop_orphans()
        return freed


def by_arrival(request: Request, user_priority: int = 0) -> tuple[int, ...]:
    """The key of a request without a program: behind all others, by age."""
    is_new = request.status is not RequestStatus.PREEMPTED
    return (user_priority, is_new, 1, int(request.arrival_time * 1e6), 0)
