"""Lookups whose reader is gone, until their locks are released.

What a lookup finds is locked in the server's memory for its reader, for as long as the
longest queue may be. The server can release it only once the lookup has ended and while
its session lasts; LMCache's connector ends the session of an aborted request at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ttlcache_lmcache import internals


@dataclass(slots=True)
class _Lookup:
    tokens: list[int]
    salt: str
    is_session_over: bool = False  # LMCache asked to end it


class OrphanedLookups:
    """Keeps LMCache's record of such lookups until they have ended."""

    def __init__(self, adapter: Any) -> None:
        """
        Args:
            adapter: LMCache's, of the scheduler; two of its methods are wrapped.
        """
        self._adapter = adapter
        self._lookups: dict[str, _Lookup] = {}
        self._clean_up, self._end = adapter.cleanup_lookup_result, adapter.end_session
        adapter.cleanup_lookup_result = self._clean_up_later
        adapter.end_session = self._end_later

    def __len__(self) -> int:
        return len(self._lookups)

    def add(self, request_id: str, tokens: list[int], salt: str) -> None:
        """The lookup of `request_id`, if there is one, has lost its reader.

        Args:
            tokens, salt: as they were looked up.
        """
        if request_id in internals.open_lookups(self._adapter):
            self._lookups.setdefault(request_id, _Lookup(tokens, salt))
            self._settle(request_id)  # nothing may be left to run after an abort

    def settle(self) -> None:
        """Release what ended lookups locked; never waits."""
        for request_id in list(self._lookups):
            self._settle(request_id)

    def _settle(self, request_id: str) -> None:
        found = self._adapter.check_lookup_result(request_id)
        if not self._adapter.is_healthy:
            # LMCache says 0 then, but what was found may be locked still.
            internals.ask_anew(self._adapter, request_id)
            return
        if found is None:
            return
        # First of all: one that cannot be released must not be tried for ever.
        lookup = self._lookups.pop(request_id)
        if found:
            self._adapter.free_lookup_locks(
                lookup.tokens, 0, found, request_id, lookup.salt
            )
        self._clean_up(request_id)
        if lookup.is_session_over:
            self._end(request_id)

    def _clean_up_later(self, request_id: str) -> None:
        if request_id not in self._lookups:
            self._clean_up(request_id)

    def _end_later(self, request_id: str) -> Any:
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return self._end(request_id)
        lookup.is_session_over = True
        return None
