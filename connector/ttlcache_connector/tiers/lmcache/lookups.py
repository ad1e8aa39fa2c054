"""Lookups of waiting requests at LMCache: begin and poll.

LMCache answers between steps, and its connector looks once a step, twice for each
lookup.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from ttlcache_connector.tiers.base import Match
from ttlcache_connector.tiers.lmcache.salts import SaltGenerations
from ttlcache_lmcache import internals

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Open lookups looked at in one step, the longest unseen first.
LOOKS = 16


class Lookups:
    """One for each waiting request, done by LMCache's connector."""

    def __init__(self, inner: Any, salts: SaltGenerations) -> None:
        """
        Args:
            inner: LMCache's connector, scheduler role.
            salts: make LMCache's record of a request.
        """
        self._inner = inner
        self._adapter = inner.scheduler_adapter
        self._salts = salts
        self._open: dict[str, None] = {}  # without an answer yet
        self._answered: set[str] = set()  # those that `match` has told

    def begin_early(self, request: Request) -> None:
        """The request came, and nothing of it is pinned."""
        self._inner.on_new_request(request)
        self._open[request.request_id] = None

    def match(
        self, request: Request, hit_tokens: int, lookup_limit_tokens: float
    ) -> Match:
        """As `SchedulerTier.match`."""
        request_id = request.request_id
        tracker = self._salts.tracker_of(request)
        if request_id not in internals.open_lookups(self._adapter):
            chunk = self._adapter.lmcache_tokens_per_chunk
            if (
                min(request.num_tokens, lookup_limit_tokens) // chunk * chunk
                <= hit_tokens
            ):
                # What is in GPU memory reaches as far as anything stored could.
                align = internals.hit_alignment_tokens(self._inner)
                tracker.num_vllm_hit_tokens = hit_tokens // align * align
                return Match(is_answered=request_id in self._answered)
        tokens, _ = self._inner.get_num_new_matched_tokens(request, hit_tokens)
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
        self._open.pop(request_id, None)
        self._answered.discard(request_id)

    def next_step(self) -> None:
        """Look at open lookups, whatever vLLM asks for in the step to come.

        LMCache's connector needs two looks at each, a server's answer apart, and vLLM
        asks for no request behind one that finds no memory.
        """
        for request_id in list(islice(self._open, LOOKS)):
            del self._open[request_id]
            if request_id not in internals.open_lookups(self._adapter):
                continue
            if self._adapter.check_lookup_result(request_id) is None:
                self._open[request_id] = None
