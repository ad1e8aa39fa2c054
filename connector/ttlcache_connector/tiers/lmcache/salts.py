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
from ttlcache_connector.tiers.lmcache.client import sanitize_request_config
from ttlcache_connector.tiers.lmcache.orphaned_lookups import OrphanedLookups
from ttlcache_lmcache import internals

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logger(__name__)

#: What LMCache 0.5 allows in a salt.
MAX_SALT, FORBIDDEN = 128, frozenset("@/\\\0")
#: Where a tracker keeps the salt as the client sent it.
_AS_SENT = "ttlcache_salt_as_sent"


class SaltGenerations:
    """Salts of lookups and stores, through LMCache's trackers of requests."""

    def __init__(self, inner: Any, orphans: OrphanedLookups) -> None:
        """
        Args:
            inner: LMCache's connector, scheduler role.
            orphans: takes over lookups whose reader is gone.
        """
        self._orphans = orphans
        self._suffix = ""
        self._adapter = inner.scheduler_adapter
        self._trackers: dict[str, LMCacheMPRequestTracker] = inner.request_trackers
        self._make = internals.replace_tracker_factory(inner, self.tracker_of)

    def salt(self, salt: str) -> str:
        """The salt in LMCache's keys for a client's salt.

        LMCache refuses long ones and some characters; clients may send either.
        """
        name = salt + self._suffix
        if name.isascii() and len(name) <= MAX_SALT and FORBIDDEN.isdisjoint(name):
            return name
        return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()

    def start_generation(self) -> None:
        """Nothing that was computed until now is looked up again."""
        self._suffix = f"~{uuid.uuid4().hex[:16]}"
        for tracker in self._trackers.values():
            # The others have KV of before the reset, or are made anew as preempted.
            if tracker.state is LMCacheMPRequestState.PREFETCHING:
                self._prefill(tracker)
                tracker.cache_salt = self.salt(vars(tracker)[_AS_SENT])
        log.info("ttlcache: the lower tier was reset: what lies there is not used")

    def tracker_of(self, request: Request) -> LMCacheMPRequestTracker:
        """LMCache's record of a request, made where there is none.

        With our salt, and without what would raise in every step.
        """
        known = self._trackers.get(request.request_id)
        tracker: LMCacheMPRequestTracker = self._make(request)
        if tracker is not known:
            sanitize_request_config(tracker)
            vars(tracker)[_AS_SENT] = tracker.cache_salt
            tracker.cache_salt = self.salt(tracker.cache_salt)
        return tracker

    def orphan_lookup(self, request_id: str) -> None:
        """What the request's lookup finds will not be loaded."""
        tracker = self._trackers.get(request_id)
        if tracker is not None:
            tokens = list(tracker.get_token_ids())
            self._orphans.add(request_id, tokens, tracker.cache_salt)

    def _prefill(self, tracker: LMCacheMPRequestTracker) -> None:
        """It waits, and asked or was about to: let it ask for nothing."""
        self.orphan_lookup(tracker.request_id)
        self._adapter.cleanup_lookup_result(tracker.request_id)
        tracker.state = LMCacheMPRequestState.BYPASS_LMCACHE
        tracker.num_stored_tokens = tracker.num_lmcache_hit_tokens = 0
