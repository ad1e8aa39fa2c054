"""Lookups of waiting requests at LMCache: begin and poll.

LMCache answers between steps, and its connector looks once a step, twice for each
lookup: without more, a request that could have begun waits for two or three steps, each
of which may be a prefill of a tenth of a second. So answers, a millisecond away, are
waited for a little within the step.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

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
            salts: make LMCache's record of a request.
        """
        self._inner = inner
        self._adapter = inner.scheduler_adapter
        self._salts = salts
        self._wait = LookupWait(self._adapter, now_s)
        self._open: dict[str, None] = {}  # without an answer yet
        self._answered: set[str] = set()  # those that `match` has told

    def begin_early(self, request: Request) -> None:
        """The request came, and nothing of it is pinned."""
        self._inner.on_new_request(request)
        self._open[request.request_id] = None

    def match(
        self, request: Request, hit_tokens: int, max_stored_tokens: float
    ) -> Match:
        """As `SchedulerTier.match`."""
        request_id = request.request_id
        tracker = self._salts.tracker_of(request)
        if request_id not in internals.open_lookups(self._adapter):
            chunk = self._adapter.lmcache_tokens_per_chunk
            if (
                min(request.num_tokens, max_stored_tokens) // chunk * chunk
                <= hit_tokens
            ):
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
        elif hit_tokens + tokens > request.num_tokens:
            tokens = 0  # a server came back with chunks of another size
        else:
            self._open.pop(request_id, None)
            self._answered.add(request_id)
        return Match(tokens, is_answered=request_id in self._answered)

    def end(self, request_id: str) -> None:
        """The request waits no longer."""
        self._wait.forget(request_id)
        self._open.pop(request_id, None)
        self._answered.discard(request_id)

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
