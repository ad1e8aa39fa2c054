"""Inside the LMCache server: lookups that begin within a context.

LMCache 0.5 looks for a context from its first chunk on, so that a tail of which GPU
memory holds the beginning is not found unless the beginning was stored, too. Its keys
say where a range begins, and stores, loads and releases heed that; lookups do here.
Such a lookup answers as LMCache's own do: with the end of what was found, in chunks
from the beginning of the context; 0 if its first chunk is not there. What LMCache
tells others about a lookup names the whole context: that is what it is about.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ttlcache_connector.log import logger

log = logger(__name__)

_NEEDED = (
    *("lookup", "free_lookup_locks", "_consume_prefetch_result"),
    *("_register_prefetch_job", "_ctx"),
)


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


class _Storage:
    """LMCache's storage manager, for lookups that skip some chunks."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def skipped(self) -> int:
        """Chunks before those that this thread's lookup is about."""
        return getattr(self._thread, "skipped", 0)

    @skipped.setter
    def skipped(self, chunks: int) -> None:
        self._thread.skipped = chunks

    def submit_prefetch_task(self, spec: Any, **kwargs: Any) -> Any:
        if skipped := self.skipped:
            rows = [replace(row, keys=row.keys[skipped:]) for row in spec.key_groups]
            spec = replace(spec, key_groups=rows)
        return self._inner.submit_prefetch_task(spec, **kwargs)


class _Context:
    """LMCache's server context with that storage manager."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.storage_manager = _Storage(inner.storage_manager)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _wrap(module: Any) -> None:
    context = module._ctx = _Context(module._ctx)  # noqa: SLF001 - no plugin point
    chunk_tokens, sessions = context.chunk_size, context.session_manager
    storage = context.storage_manager
    look_up, free = module.lookup, module.free_lookup_locks
    register = module._register_prefetch_job  # noqa: SLF001
    consume = module._consume_prefetch_result  # noqa: SLF001

    def begin_of(request_id: str) -> int:
        session = sessions.get(request_id)
        key = None if session is None else session.lookup_ipc_key
        return 0 if key is None else int(key.start)

    @functools.wraps(look_up)
    def lookup(key: Any, tp_size: int) -> None:
        if 0 < key.start >= key.end:
            key = replace(key, start=0, end=0)  # about nothing: LMCache answers so
        storage.skipped = key.start // chunk_tokens
        try:
            look_up(key, tp_size)
        finally:
            storage.skipped = 0

    def registered(job: Any) -> None:
        # LMCache's hit rate is about what was looked for.
        skipped_tokens = storage.skipped * chunk_tokens
        job.requested_tokens = max(0, job.requested_tokens - skipped_tokens)
        register(job)

    def consumed(job: Any) -> int | None:
        found: int | None = consume(job)
        if not found:
            return found
        end: int = found + begin_of(job.request_id) // chunk_tokens
        # What is released later is counted from the beginning of the context, too.
        sessions.get_or_create(job.request_id).prefetch_hit_chunks = end
        return end

    @functools.wraps(free)
    def free_lookup_locks(key: Any, tp_size: int) -> None:
        # Before its start the lookup locked nothing: those locks are others'.
        free(replace(key, start=max(key.start, begin_of(key.request_id))), tp_size)

    module.lookup, module.free_lookup_locks = lookup, free_lookup_locks
    module._register_prefetch_job = registered  # noqa: SLF001
    module._consume_prefetch_result = consumed  # noqa: SLF001
