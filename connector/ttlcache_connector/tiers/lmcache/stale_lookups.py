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


class OutdatedLookups:
    """Which waiting requests should ask anew, and that they can."""

    def __init__(
        self,
        adapter: Any,
        trackers: Mapping[str, LMCacheMPRequestTracker],
        give_back: Callable[[str], None],
    ) -> None:
        """
        Args:
            adapter: LMCache's, of the scheduler.
            trackers: what LMCache knows of each request.
            give_back: forgets a request's lookup, and unlocks what it found.
        """
        self._adapter = adapter
        self._trackers = trackers
        self._give_back = give_back
        self._chunk = adapter.lmcache_tokens_per_chunk
        self._copies: dict[str, LMCacheMPRequestMetadata] = {}
        self._below: dict[str, int] = {}  # waiting request -> tokens that are there

    def copies_begin(self, stores: Mapping[str, LMCacheMPRequestMetadata]) -> None:
        """What workers are told to store in this step."""
        self._copies.update(stores)

    def copy_failed(self, request_id: str) -> None:
        """On one rank at least: what is found below is what was."""
        self._copies.pop(request_id, None)

    def copy_ended(self, request_id: str) -> None:
        """On all ranks: whoever goes on with it, and has asked already, was early."""
        stored = self._copies.pop(request_id, None)
        if stored is None:
            return
        context = stored.op.token_ids[: stored.op.end]
        for waiting in self._adapter._pending_lookups:  # noqa: SLF001
            tracker = self._trackers.get(waiting)
            if (
                tracker is None
                or tracker.state is not LMCacheMPRequestState.PREFETCHING
                or tracker.cache_salt != stored.cache_salt
            ):
                continue
            found = tracker.num_lmcache_hit_tokens
            tokens = tracker.all_token_ids
            if tracker.mm_adjusted_prompt_ids:
                tokens = tracker.get_token_ids()
            below = self._common_tokens(tokens, context, found)
            if below > found:
                self._below[waiting] = max(below, self._below.get(waiting, 0))

    def forget(self, request_id: str) -> None:
        """The request waits no longer."""
        self._below.pop(request_id, None)

    def reset(self) -> None:
        """What is below is worthless."""
        self._copies.clear()
        self._below.clear()

    def may_ask(self, request_id: str, hit_tokens: int, began: int = 0) -> bool:
        """Whether the request's lookup, done or to come, is as good as a new one.

        Args:
            hit_tokens: what GPU memory holds of the request now.
            began: where its lookup began, behind what GPU memory held then.

        False: ask again in the next step. One that missed what is there is given back,
        and a step later a new one begins: LMCache's server does not promise to take
        what is sent about one request in its order.
        """
        below = self._below.get(request_id, 0)
        has_gap = began > hit_tokens
        if below <= hit_tokens and not has_gap:
            return True
        found = self._adapter.check_lookup_result(request_id)
        if found is None:
            return False
        self.forget(request_id)
        if found >= below and not has_gap:
            return True
        self._give_back(request_id)
        tracker = self._trackers[request_id]
        tracker.num_stored_tokens = tracker.num_lmcache_hit_tokens = 0
        return False

    def _common_tokens(
        self, tokens: Sequence[int], context: Sequence[int], known: int
    ) -> int:
        """How far both are alike, in whole chunks, where they are up to `known`.

        Most requests part from a context in its first chunk after what they found.
        """
        end, size = known, self._chunk
        while end + size <= len(context):
            if list(tokens[end : end + size]) != context[end : end + size]:
                break
            end += size
        return end
