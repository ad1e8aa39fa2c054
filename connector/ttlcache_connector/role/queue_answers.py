"""What the waiting queue and the allocation guard ask about a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from ttlcache.types import Admission, ReleaseMode, Urgency
from ttlcache_connector.engine.request_view import is_loading
from ttlcache_connector.faults import guarded
from ttlcache_connector.role.parts import SideParts

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ttlcache_connector.blocks.demoting import DemotingBlocks


class QueueAnswers(SideParts):
    """Order, admission and memory of requests that wait."""

    def priority(self, request: Request) -> tuple[int, ...]:
        """Sort key of a waiting request (callback of the program queue)."""
        preempted = request.status is RequestStatus.PREEMPTED
        try:
            if self.controller is not None:
                return self.controller.queue.priority(
                    request.request_id, preempted=preempted
                )
        except KeyError:
            pass  # its arrival failed and was counted: last, in order of time
        except Exception:  # noqa: BLE001 - the serving path fails open
            self.faults.record("priority")
        age = int(request.arrival_time * 1e6)
        return (self._user_priority(request), not preempted, 1, age, 0)

    def admission(self, request: Request, needed_blocks: int) -> Admission:
        """Whether a waiting request may take memory now.

        Before it says no, pins that have no right to stay are evicted for it.
        """
        controller, request_id = self.controller, request.request_id
        if controller is None or not self._by_program:
            return Admission.ADMIT
        memory = controller.memory
        may_start = memory.may_start(request_id, needed_blocks)
        if not may_start and self.ledger is not None:
            # It waits for memory as others do: what holds that has its price.
            self.ledger.wanted_blocks = needed_blocks
            memory.on_refused(request_id)
            if memory.free_for_newcomer(request_id, needed_blocks):
                may_start = memory.may_start(request_id, needed_blocks)
        return Admission.ADMIT if may_start else Admission.WAIT

    def requeue_if_moved(self, request: Request) -> bool:
        """Whether the head of the queue must be sorted in anew."""
        try:
            if self.controller is not None:
                return self.controller.queue.requeue_if_moved(request.request_id)
        except Exception:  # noqa: BLE001 - the serving path fails open
            self.faults.record("requeue_if_moved")
        return False

    @guarded()
    def note_aged(self) -> None:
        """A request reached the bound on waiting."""
        self.count("aged_requests")

    def eviction(self, needed_blocks: int, request: Request, urgency: Urgency) -> int:
        """Blocks freed from pins for `request`.

        0: do not try again in this step. Nothing more may be taken, or copies that are
        under way will give the memory.
        """
        if self.controller is None or self.ledger is None:
            return 0
        freed = 0
        if urgency is not Urgency.RUNNING:
            self.ledger.wanted_blocks = needed_blocks
            self.controller.memory.on_refused(request.request_id)
            if urgency is not Urgency.STALLED:  # that one has patience of its own
                freed = self.controller.memory.reprice()
            if self._demoting is not None:
                return freed + self._evict_to_tier(
                    self._demoting, needed_blocks - freed, request, urgency
                )
        elif self._demoting is not None:
            return self._take_now(self._demoting, needed_blocks, request)
        if freed < needed_blocks:
            freed += self._reclaim(needed_blocks - freed, request, urgency)
        return freed

    def _take_now(self, ended: DemotingBlocks, needed: int, request: Request) -> int:
        """The same for a running request, which waits for no copy.

        A prefix is only usable up to its first missing block. If a block is overwritten
        before it was copied, every later block already stored becomes unreachable. So
        blocks with a pending copy are taken last.
        """
        if ended.demotes_parts:
            freed = ended.free_cheapest(needed)
        else:
            freed = ended.free_expired(needed, at_once=True)
        if freed < needed:
            freed += self._reclaim(needed - freed, request, Urgency.RUNNING)
        if freed < needed:
            freed += ended.free_expired(needed - freed, at_once=True)
        return freed

    def _evict_to_tier(
        self,
        ended: DemotingBlocks,
        needed_blocks: int,
        request: Request,
        urgency: Urgency,
    ) -> int:
        """The same for a request that can wait: for a copy of milliseconds, where the
        alternative is a prefill of seconds."""
        pool = ended.pool
        before = pool.get_num_free_blocks()
        ended.free_expired(needed_blocks, at_once=False)
        lack = needed_blocks - (pool.get_num_free_blocks() - before) - ended.soon_free()
        if lack > 0:
            self._reclaim(lack, request, urgency, ReleaseMode.COPY_FIRST)
        freed = int(pool.get_num_free_blocks() - before)
        return freed if freed >= needed_blocks or not ended.soon_free() else 0

    def _reclaim(
        self,
        blocks: int,
        request: Request,
        urgency: Urgency,
        mode: ReleaseMode = ReleaseMode.FREE_NOW,
    ) -> int:
        assert self.controller is not None
        assert self.ledger is not None
        patient = urgency is not Urgency.STALLED or not self.is_overdue(request)
        freed = self.controller.memory.reclaim(
            blocks, urgency, request.request_id, patient=patient, mode=mode
        )
        if not freed and urgency is Urgency.STALLED:
            # Nothing runs, nothing frees: what a fault left behind goes, too.
            return self.drop_orphans()
        return freed

    def is_loading(self) -> bool:
        """Whether a request that holds its blocks waits for remote KV.

        One whose KV is there does not: vLLM calls it loading until its turn comes,
        which may never be while the one before it lacks memory that pins hold.
        """
        # Looked up among those admitted, not in the queue: thousands may wait there.
        return any(
            is_loading(request) and request_id not in self._arrived
            for request_id, request in self._prefilling.items()
        )

    def is_overdue(self, request: Request) -> bool:
        return self._queue is not None and self._queue.is_aged(request.request_id)

    def _user_priority(self, request: Request) -> int:
        # vLLM ignores `priority` unless the operator allowed it; so do we.
        return int(request.priority) if self._heeds_priority else 0
