"""After a reset, usually new weights, nothing older is loaded or found.

LMCache's own reset empties the CPU memory of its server: for everybody who shares it,
not the disk below, and not what is being stored at that moment. So what is stored
after a reset gets keys of its own instead: the salt, part of every key, is
lengthened by a name that was never used before. What lies there under older keys is
evicted in time, least recently used first.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING, Any

from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPRequestState,
    LMCacheMPRequestTracker,
)

from ttlcache_connector.log import logger
from ttlcache_connector.tiers.lmcache.client_params import heed_wishes
from ttlcache_connector.tiers.lmcache.orphaned_lookups import Forsaken

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logger(__name__)

#: What LMCache 0.5 allows in a salt.
MAX_SALT, FORBIDDEN = 128, frozenset("@/\\\0")
#: Where a tracker keeps the salt as the client sent it.
_AS_SENT = "ttlcache_salt_as_sent"


class Epochs:
    """Salts of lookups and stores, through LMCache's trackers of requests."""

    def __init__(self, inner: Any, forsaken: Forsaken) -> None:
        """
        Args:
            inner: LMCache's connector, scheduler role.
            forsaken: takes lookups that are not waited for any more.
        """
        self._forsaken = forsaken
        self._suffix = ""
        self._adapter = inner.scheduler_adapter
        self._trackers: dict[str, LMCacheMPRequestTracker] = inner.request_trackers
        self._make = inner._get_or_create_request_tracker  # noqa: SLF001
        inner._get_or_create_request_tracker = self._tracker_of  # noqa: SLF001

    def salt(self, salt: str) -> str:
        """What a client's salt is called below.

        LMCache refuses long ones and some characters; clients may send either.
        """
        name = salt + self._suffix
        if name.isascii() and len(name) <= MAX_SALT and FORBIDDEN.isdisjoint(name):
            return name
        return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()

    def begin_anew(self) -> None:
        """What was computed until now is never asked for again."""
        self._suffix = f"~{uuid.uuid4().hex[:16]}"
        for tracker in self._trackers.values():
            # The others have KV of before the reset, or are made anew as preempted.
            if tracker.state is LMCacheMPRequestState.PREFETCHING:
                self._prefill(tracker)
                tracker.cache_salt = self.salt(vars(tracker)[_AS_SENT])
        log.info("ttlcache: the lower tier was reset: what lies there is not used")

    def forget_lookup(self, request_id: str) -> None:
        """Nobody will load what a lookup finds."""
        tracker = self._trackers.get(request_id)
        if tracker is not None:
            tokens = list(tracker.get_token_ids())
            self._forsaken.add(request_id, tokens, tracker.cache_salt)

    def _prefill(self, tracker: LMCacheMPRequestTracker) -> None:
        """It waits, and asked or was about to: let it ask for nothing."""
        self.forget_lookup(tracker.request_id)
        self._adapter.cleanup_lookup_result(tracker.request_id)
        tracker.state = LMCacheMPRequestState.BYPASS_LMCACHE
        tracker.num_stored_tokens = tracker.num_lmcache_hit_tokens = 0

    def _tracker_of(self, request: Request) -> LMCacheMPRequestTracker:
        known = self._trackers.get(request.request_id)
        tracker: LMCacheMPRequestTracker = self._make(request)
        if tracker is not known:
            heed_wishes(tracker)
            vars(tracker)[_AS_SENT] = tracker.cache_salt
            tracker.cache_salt = self.salt(tracker.cache_salt)
        return tracker
