"""Lookups that were answered before what they looked for was below.

LMCache answers every later question about a waiting request as it answered the first.
A request may wait for long, though, and lose its pin meanwhile: what goes down then is
found only by a lookup that begins after its copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPRequestMetadata,
    LMCacheMPRequestState,
    LMCacheMPRequestTracker,
)

#: Copies under way that are followed: of some, as of preempted requests, LMCache never
#: tells the end.
MAX_COPIES = 256


class OutdatedLookups:
    """Which waiting requests should ask anew, and that they can."""

    def __init__(
        self,
        adapter: Any,
        trackers: Mapping[str, LMCacheMPRequestTracker],
        forget_lookup: Callable[[str], None],
    ) -> None:
        """
        Args:
            adapter: LMCache's, of the scheduler.
            trackers: what LMCache knows of each request.
            forget_lookup: gives back what a lookup found.
        """
        self._adapter = adapter
        self._trackers = trackers
        self._forget_lookup = forget_lookup
        self._copies: dict[str, LMCacheMPRequestMetadata] = {}
        self._below: dict[str, int] = {}  # waiting request -> tokens that are there

    def copy_begins(self, last_store: LMCacheMPRequestMetadata) -> None:
        """A finished turn is being stored, this being the end of it."""
        if len(self._copies) >= MAX_COPIES:
            del self._copies[next(iter(self._copies))]
        self._copies[last_store.request_id] = last_store

    def copy_ended(self, request_id: str) -> None:
        """Whoever goes on with that turn, and has asked already, asked too early."""
        stored = self._copies.pop(request_id, None)
        if stored is None:
            return
        end = stored.op.end
        context = stored.op.token_ids[:end]
        for waiting in self._adapter._pending_lookups:  # noqa: SLF001
            tracker = self._trackers.get(waiting)
            if tracker is not None and _goes_on_with(tracker, context, stored):
                self._below[waiting] = max(end, self._below.get(waiting, 0))

    def forget(self, request_id: str) -> None:
        """The request waits no longer."""
        self._below.pop(request_id, None)

    def may_ask(self, request_id: str, hit_tokens: int) -> bool:
        """Whether the request's lookup, done or to come, is as good as a new one.

        False: ask again in the next step. One that missed what is there is given back,
        so that the next question begins a new one.
        """
        below = self._below.get(request_id, 0)
        if below <= hit_tokens:
            return True
        found = self._adapter.check_lookup_result(request_id)
        if found is None:
            return False
        self.forget(request_id)
        if found < below:
            self._forget_lookup(request_id)
            tracker = self._trackers[request_id]
            tracker.num_stored_tokens = tracker.num_lmcache_hit_tokens = 0
        return True


def _goes_on_with(
    tracker: LMCacheMPRequestTracker,
    context: Sequence[int],
    stored: LMCacheMPRequestMetadata,
) -> bool:
    end = len(context)
    return (
        tracker.state is LMCacheMPRequestState.PREFETCHING
        and tracker.cache_salt == stored.cache_salt
        and len(tracker.all_token_ids) >= end
        # Most contexts differ in their last token: no need to copy them.
        and tracker.all_token_ids[end - 1] == context[-1]
        and tracker.get_token_ids()[:end] == context
    )
