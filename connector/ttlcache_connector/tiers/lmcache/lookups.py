"""What requests that wait ask LMCache, and when."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from ttlcache_connector.tiers.lmcache.lookup_wait import LookupPatience
from ttlcache_connector.tiers.lmcache.salts import Epochs
from ttlcache_connector.tiers.lmcache.stale_lookups import OutdatedLookups
from ttlcache_connector.tiers.lmcache.suffix_lookup import LookupStarts

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ttlcache_connector.tiers.lmcache.stored_index import Below

#: Open lookups looked at in one step, the longest unseen first.
LOOKS = 16


class Lookups:
    """One for each waiting request, done by LMCache's connector."""

    def __init__(self, inner: Any, epochs: Epochs, now_s: Callable[[], float]) -> None:
        """
        Args:
            inner: LMCache's connector, scheduler role.
            epochs: unlocks what a lookup found that is given back.
        """
        self._inner = inner
        self._adapter = inner.scheduler_adapter
        self._epochs = epochs
        self._now_s = now_s
        self.starts = LookupStarts(self._adapter)
        self.below: Below | None = None  # told what lookups find
        self.outdated = OutdatedLookups(
            self._adapter, inner.request_trackers, self._give_back
        )
        self._patience = LookupPatience(self._adapter, now_s)
        # Without an answer yet, and when the answers of others were there.
        self._open: dict[str, None] = {}
        self._answered_s: dict[str, float] = {}
        # When a lookup was first waited for, and for how long.
        self._asked_s: dict[str, float] = {}
        self._took_s: dict[str, float] = {}

    def begin_early(self, request: Request) -> None:
        """The request came, and nothing of it is pinned.

        If its tail is below alone it begins there, and is given back should GPU memory
        not reach as far.
        """
        self.starts.set_early(request)
        with self.starts.beginning_at(self.starts.of(request.request_id)):
            self._inner.on_new_request(request)
        self._open[request.request_id] = None

    def match(
        self, request: Request, hit_tokens: int, stored_tokens: float
    ) -> tuple[int | None, bool]:
        """As `SchedulerTier.match`."""
        request_id = request.request_id
        began = self.starts.of(request_id)
        if not self.outdated.may_ask(request_id, hit_tokens, began):
            return None, False
        tracker = self._inner._get_or_create_request_tracker(request)  # noqa: SLF001
        if request_id not in self._adapter._pending_lookups:  # noqa: SLF001
            chunk = self._adapter.lmcache_tokens_per_chunk
            if min(request.num_tokens, stored_tokens) // chunk * chunk <= hit_tokens:
                # What is in GPU memory reaches as far as anything below could.
                align = self._inner._hit_alignment_tokens  # noqa: SLF001
                tracker.num_vllm_hit_tokens = hit_tokens // align * align
                return 0, False
            self.starts.set(request, hit_tokens)
        now_s = self._now_s()
        asked_s = self._asked_s.setdefault(request_id, now_s)
        look = self._inner.get_num_new_matched_tokens
        with self.starts.beginning_at(self.starts.of(request_id)):
            tokens, is_async = look(request, hit_tokens)
            while tokens is None and self._patience.wait(request_id):
                tokens, is_async = look(request, hit_tokens)
        if self.starts.of(request_id):
            # What lies before is owed still: all of it is offered again, and LMCache
            # takes what it does not have.
            tracker.num_stored_tokens = 0
        if tokens is None:
            self._open[request_id] = None
        elif request_id not in self._took_s:
            self._open.pop(request_id, None)
            answered_s = self._answered_s.pop(request_id, self._now_s())
            self._took_s[request_id] = max(0.0, answered_s - asked_s)
            if self.below is not None:
                begin, end = self.starts.of(request_id), tracker.num_lmcache_hit_tokens
                self.below.found(request.block_hashes, begin, end)
        return tokens, bool(tokens) and is_async

    def was_asked(self, request_id: str) -> bool:
        """Whether LMCache has answered for a waiting request."""
        return request_id in self._took_s

    def took_s(self, request_id: str) -> float:
        """From when the request's lookup was first waited for until its answer."""
        return self._took_s.get(request_id, 0.0)

    def end(self, request_id: str) -> None:
        """The request waits no longer."""
        self._forget(request_id)
        self.outdated.forget(request_id)

    def next_step(self) -> None:
        """Look at open lookups, whatever vLLM asks for in the step to come.

        LMCache's connector needs two looks at each, a server's answer apart, and vLLM
        asks for no request behind one that finds no memory.
        """
        self._patience.next_step()
        for request_id in list(islice(self._open, LOOKS)):
            del self._open[request_id]
            if request_id not in self._adapter._pending_lookups:  # noqa: SLF001
                continue
            if self._adapter.check_lookup_result(request_id) is None:
                self._open[request_id] = None
            else:
                self._answered_s[request_id] = self._now_s()

    def reset(self) -> None:
        """What is below is worthless."""
        self.outdated.reset()
        self.starts.reset()

    def _give_back(self, request_id: str) -> None:
        self._epochs.forget_lookup(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self.starts.forget(request_id)
        self._patience.forget(request_id)
        self._open.pop(request_id, None)
        self._answered_s.pop(request_id, None)
        self._asked_s.pop(request_id, None)
        self._took_s.pop(request_id, None)
