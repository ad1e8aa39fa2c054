"""A lookup's answer is a millisecond away: waited for, a little, within the step.

LMCache answers between steps, and its connector looks once a step, twice for each
lookup: a request that could have begun waits for two or three steps, each of which may
be a prefill of a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

#: Waited for all lookups of one step together, and for each lookup in all.
MAX_WAIT_S = 0.002


class LookupPatience:
    """Waits for answers as long as a step does not feel it."""

    def __init__(self, adapter: Any, now_s: Callable[[], float]) -> None:
        """
        Args:
            adapter: LMCache's, of the scheduler.
        """
        self._adapter = adapter
        self._now_s = now_s
        self._left_s = MAX_WAIT_S
        self._left_of: dict[str, float] = {}

    def next_step(self) -> None:
        self._left_s = MAX_WAIT_S

    def forget(self, request_id: str) -> None:
        """There is no lookup of the request any more."""
        self._left_of.pop(request_id, None)

    def wait(self, request_id: str) -> bool:
        """Whether something was heard of the request's lookup: look again."""
        own_s = self._left_of.get(request_id, MAX_WAIT_S)
        left_s = min(self._left_s, own_s)
        if left_s <= 0.0:
            return False
        began_s = self._now_s()
        heard = False
        for answer in self._awaited(request_id):
            heard = answer.wait(max(0.0, left_s - (self._now_s() - began_s)))
            if not heard:
                break
        took_s = self._now_s() - began_s
        self._left_s -= took_s
        # One that waits for the disk is asked again and again: never for long.
        self._left_of[request_id] = own_s - max(took_s, MAX_WAIT_S / 8)
        return heard

    def _awaited(self, request_id: str) -> Iterator[Any]:
        adapter = self._adapter
        ack = adapter._unacked_lookups.get(request_id)  # noqa: SLF001
        if ack is not None:
            yield from list(ack.futures.values())
            return
        status = adapter._lookup_status.get(request_id, {})  # noqa: SLF001
        yield from [answer for answer, _ in status.values()]
