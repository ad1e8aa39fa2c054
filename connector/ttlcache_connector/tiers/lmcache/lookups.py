"""Lookups of waiting requests at LMCache: begin, poll, and redo when stale.

LMCache answers between steps, and its connector looks once a step, twice for each
lookup: without more, a request that could have begun waits for two or three steps, each
of which may be a prefill of a tenth of a second. So answers, a millisecond away, are
waited for a little within the step.

LMCache also answers every later question about a waiting request as it answered the
first. A request may wait for long, though, and lose its pin meanwhile: what is stored
then is found only by a lookup that begins after its copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPRequestMetadata,
    LMCacheMPRequestState,
    LMCacheMPRequestTracker,
)

from ttlcache_connector.tiers.base import Match
from ttlcache_connector.tiers.lmcache.salts import SaltGenerations
from ttlcache_lmcache import internals

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Open lookups looked at in one step, the longest unseen first.
LOOKS = 16
#: Waited for all lookups of one step together, and for each lookup in all.
MAX_WAIT_S = 0.002


class Lookups:
    """One for each waiting request, done by LMCache's connector."""

    def __init__(
        self,
        inner: Any,
        salts: SaltGenerations,
        now_s: Callable[[], float],
    ) -> None:
        """
        Args:
            inner: LMCache's connector, scheduler role.
            salts: unlocks what a lookup found that is given back.
        """
        self._inner = inner
        self._adapter = inner.scheduler_adapter
        self._salts = salts
        self.stale = StaleLookups(
            self._adapter, inner.request_trackers, self._give_back
        )
        self._wait = LookupWait(self._adapter, now_s)
        self._open: dict[str, None] = {}  # without an answer yet
        self._answered: set[str] = set()  # those that `match` has told

    def begin_early(self, request: Request) -> None:
        """The request came, and nothing of it is pinned."""
        self._inner.on_new_request(request)
        self._open[request.request_id] = None

    def match(self, request: Request, hit_tokens: int, stored_tokens: float) -> Match:
        """As `SchedulerTier.match`."""
        request_id = request.request_id
        if self.stale.renew_if_stale(request_id, hit_tokens):
            return Match(None)
        tracker = self._salts.tracker_of(request)
        if request_id not in internals.open_lookups(self._adapter):
            chunk = self._adapter.lmcache_tokens_per_chunk
            if min(request.num_tokens, stored_tokens) // chunk * chunk <= hit_tokens:
                # What is in GPU memory reaches as far as anything stored could.
                align = internals.hit_alignment_tokens(self._inner)
                tracker.num_vllm_hit_tokens = hit_tokens // align * align
                return Match(is_answered=request_id in self._answered)
        look = self._inner.get_num_new_matched_tokens
        tokens, _ = look(request, hit_tokens)
        while tokens is None and self._wait.for_answer(request_id):
            tokens, _ = look(request, hit_tokens)
        if tokens is None:
            self._open[request_id] = None
        else:
            self._open.pop(request_id, None)
            self._answered.add(request_id)
        return Match(tokens, is_answered=request_id in self._answered)

    def end(self, request_id: str) -> None:
        """The request waits no longer."""
        self._forget(request_id)
        self.stale.forget(request_id)

    def next_step(self) -> None:
        """Look at open lookups, whatever vLLM asks for in the step to come.

        LMCache's connector needs two looks at each, a server's answer apart, and vLLM
        asks for no request behind one that finds no memory.
        """
        self._wait.next_step()
        for request_id in list(islice(self._open, LOOKS)):
            del self._open[request_id]
            if request_id not in internals.open_lookups(self._adapter):
                continue
            if self._adapter.check_lookup_result(request_id) is None:
                self._open[request_id] = None

    def reset(self) -> None:
        """What is stored is worthless."""
        self.stale.reset()

    def _give_back(self, request_id: str) -> None:
        self._salts.orphan_lookup(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._wait.forget(request_id)
        self._open.pop(request_id, None)
        self._answered.discard(request_id)


class LookupWait:
    """Waits for answers within a step, for no longer than `MAX_WAIT_S`."""

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

    def for_answer(self, request_id: str) -> bool:
        """Whether an answer came for the request's lookup: look again."""
        own_s = self._left_of.get(request_id, MAX_WAIT_S)
        left_s = min(self._left_s, own_s)
        if left_s <= 0.0:
            return False
        began_s = self._now_s()
        came = False
        for answer in internals.awaited_answers(self._adapter, request_id):
            came = answer.wait(max(0.0, left_s - (self._now_s() - began_s)))
            if not came:
                break
        took_s = self._now_s() - began_s
        self._left_s -= took_s
        # One that waits for the disk is asked again and again: never for long.
        self._left_of[request_id] = own_s - max(took_s, MAX_WAIT_S / 8)
        return came


class StaleLookups:
    """Lookups that were answered before what they looked for was stored."""

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
        # Of waiting requests that looked too early: tokens that are stored by now.
        self._stored_tokens: dict[str, int] = {}

    def on_copies_start(self, stores: Mapping[str, LMCacheMPRequestMetadata]) -> None:
        """The stores that workers begin in this step."""
        self._copies.update(stores)

    def on_copy_failed(self, request_id: str) -> None:
        """On one rank at least: lookups find what they found before."""
        self._copies.pop(request_id, None)

    def on_copy_end(self, request_id: str) -> None:
        """On all ranks: a waiting request that continues it looked too early."""
        stored = self._copies.pop(request_id, None)
        if stored is None:
            return
        context = stored.op.token_ids[: stored.op.end]
        for waiting in internals.open_lookups(self._adapter):
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
            stored_tokens = self._common_tokens(tokens, context, found)
            if stored_tokens > found:
                self._stored_tokens[waiting] = max(
                    stored_tokens, self._stored_tokens.get(waiting, 0)
                )

    def forget(self, request_id: str) -> None:
        """The request waits no longer."""
        self._stored_tokens.pop(request_id, None)

    def reset(self) -> None:
        """What is stored is worthless."""
        self._copies.clear()
        self._stored_tokens.clear()

    def renew_if_stale(self, request_id: str, hit_tokens: int) -> bool:
        """Whether to ask again in the next step, with a new lookup if need be.

        A lookup that missed what is there by now is given back, and a step later a new
        one begins: LMCache's server does not promise to take what is sent about one
        request in its order.

        Args:
            hit_tokens: what GPU memory holds of the request now.
        """
        stored_tokens = self._stored_tokens.get(request_id, 0)
        if stored_tokens <= hit_tokens:
            return False
        found = self._adapter.check_lookup_result(request_id)
        if found is None:
            return True
        self.forget(request_id)
        if found >= stored_tokens:
            return False
        self._give_back(request_id)
        tracker = self._trackers[request_id]
        tracker.num_stored_tokens = tracker.num_lmcache_hit_tokens = 0
        return True

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
