"""Inside the LMCache server: lookups that begin within a context.

LMCache 0.5 looks for a context from its first chunk on, so that a tail of which GPU
memory holds the beginning is not found unless the beginning was stored, too. Its keys
say where a range begins, and stores, loads and releases heed that; lookups do here.
Such a lookup answers as LMCache's own do: with the end of what was found, in chunks
from the beginning of the context; 0 if its first chunk is not there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ttlcache_connector.compat import logger

log = logger(__name__)

_NEEDED = ("lookup", "free_lookup_locks", "_consume_prefetch_result", "_ctx")


def heed_starts(modules: Iterable[Any]) -> bool:
    """Wrap LMCache's lookup module, before its handlers are registered.

    Args:
        modules: LMCache's own.

    Returns:
        Whether lookups heed where their key begins from now on.
    """
    for module in modules:
        if type(module).__name__ == "LookupModule":
            if all(hasattr(module, name) for name in _NEEDED):
                _wrap(module)
                return True
            log.warning("ttlcache: this LMCache's lookup module looks different")
    return False


class _Hasher:
    """LMCache's token hasher, for the lookup of this thread."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compute_chunk_hashes(self, token_ids: list[int], **range_: Any) -> Any:
        start = getattr(self.thread, "start", 0)
        return self._inner.compute_chunk_hashes(
            token_ids, **({"start": start} | range_ if start else range_)
        )


class _Context:
    """LMCache's server context with that hasher."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.token_hasher = _Hasher(inner.token_hasher)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _wrap(module: Any) -> None:
    context = module._ctx = _Context(module._ctx)  # noqa: SLF001 - no plugin point
    chunk_tokens, sessions = context.chunk_size, context.session_manager
    look_up, free = module.lookup, module.free_lookup_locks
    consume = module._consume_prefetch_result  # noqa: SLF001

    @functools.wraps(look_up)
    def lookup(key: Any, tp_size: int) -> None:
        context.token_hasher.thread.start = key.start
        try:
            look_up(key, tp_size)
        finally:
            context.token_hasher.thread.start = 0

    def begin_of(request_id: str) -> int:
        key = sessions.get_or_create(request_id).lookup_ipc_key
        return 0 if key is None else int(key.start)

    def consumed(job: Any) -> int | None:
        found: int | None = consume(job)
        if not found:
            return found
        end = found + int(begin_of(job.request_id) // chunk_tokens)
        # What is released later is counted from the beginning of the context, too.
        sessions.get_or_create(job.request_id).prefetch_hit_chunks = end
        return end

    @functools.wraps(free)
    def free_lookup_locks(key: Any, tp_size: int) -> None:
        # Before its start the lookup locked nothing: those locks are others'.
        free(replace(key, start=max(key.start, begin_of(key.request_id))), tp_size)

    module.lookup, module.free_lookup_locks = lookup, free_lookup_locks
    module._consume_prefetch_result = consumed  # noqa: SLF001
