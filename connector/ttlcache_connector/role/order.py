"""What the waiting queue asks: the order of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from ttlcache_connector.faults import guarded

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ttlcache_connector.role.parts import Parts


class OrderAnswers:
    """Program order, and order of arrival for what is in no table of ours."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._controller = parts.controller
        self.faults = parts.faults

    def priority(self, request: Request) -> tuple[int, ...]:
        """See `TTLConnector.priority`."""
        preempted = request.status is RequestStatus.PREEMPTED
        try:
            return self._controller.queue.priority(
                request.request_id, preempted=preempted
            )
        except KeyError:
            pass  # its arrival failed and was counted: last, in order of time
        except Exception:  # noqa: BLE001 - the serving path fails open
            self.faults.record("priority")
        return by_arrival(request, self._parts.engine.user_priority(request))

    @guarded(fallback=False)
    def requeue_if_moved(self, request: Request) -> bool:
        """Whether the head of the queue must be sorted in anew."""
        return self._controller.queue.requeue_if_moved(request.request_id)

    @guarded()
    def note_aged(self) -> None:
        """A request reached the bound on waiting."""
        self._parts.count("aged_requests")


def by_arrival(request: Request, user_priority: int = 0) -> tuple[int, ...]:
    """The key of a request without a program: behind all others, by age."""
    is_new = request.status is not RequestStatus.PREEMPTED
    return (user_priority, is_new, 1, int(request.arrival_time * 1e6), 0)
