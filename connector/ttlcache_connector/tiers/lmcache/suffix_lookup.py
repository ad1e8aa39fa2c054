"""Lookups that begin where GPU memory ends, for suffixes that were stored alone.

A pin that gives up its tail keeps the beginning in GPU memory; only the tail is copied
then. LMCache's own lookups begin at the first chunk, and would not find it; ttlcache's
module in LMCache's server lets them begin anywhere (`lmcache_server`).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest

from ttlcache_connector.lmcache_server import rpc

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Suffixes remembered. One that was forgotten is not found, and prefilled.
MEMORY = 4096


class SuffixIndex:
    """Suffixes of contexts that are stored while what precedes them is not.

    Kept as the hashes of the blocks right before them.
    """

    def __init__(self, chunk_tokens: int, block_tokens: int) -> None:
        """
        Args:
            chunk_tokens: of one stored chunk; suffixes begin with one.
            block_tokens: of one block hash.
        """
        self._block_tokens = block_tokens
        self._step = chunk_tokens // block_tokens
        self._before: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._before)

    def add(self, block_hash: bytes) -> None:
        """This block stays in GPU memory, what follows it is stored."""
        self._before[block_hash] = None
        self._before.move_to_end(block_hash)
        if len(self._before) > MEMORY:
            self._before.popitem(last=False)

    def discard(self, block_hash: bytes) -> None:
        """This block is stored as well."""
        self._before.pop(block_hash, None)

    def clear(self) -> None:
        self._before.clear()

    def last_within(self, request: Request, tokens: int) -> int:
        """Where the last suffix begins within the request's first `tokens`; 0: none.

        One behind a prompt that many share may be another request's.
        """
        if not self._before:
            return 0
        size = self._block_tokens
        hashes = request.block_hashes[: tokens // size]
        for end in range(len(hashes) // self._step * self._step, 0, -self._step):
            if hashes[end - 1] in self._before:
                return end * size
        return 0


class SuffixLookup:
    """Where each request's lookup begins, in tokens; most at 0."""

    def __init__(self, adapter: Any, suffixes: SuffixIndex | None) -> None:
        """
        Args:
            adapter: LMCache's, of the scheduler; one of its methods is wrapped.
            suffixes: stored without what precedes them; None: nothing ever is.
        """
        self._suffixes = suffixes
        self._clients = list(adapter.req_clients.values())
        self._chunk_tokens = adapter.lmcache_tokens_per_chunk
        self._answers: list[Any] | None = None
        self._is_supported = False
        self._on_cpu_bytes: Callable[[float], object] = lambda cpu_bytes: None
        self._asking = 0
        self._starts: dict[str, int] = {}
        self._make_key = adapter._create_key  # noqa: SLF001 - no other way in
        adapter._create_key = self._create_key  # noqa: SLF001

    def ask_servers(self, on_cpu_bytes: Callable[[float], object]) -> None:
        """Whether lookups may begin anywhere; until the answer is here, they do not.

        Args:
            on_cpu_bytes: called with the bytes of CPU memory of all servers.
        """
        order = ServerModuleCallRequest(method=rpc.LOOKUPS_BEGIN_ANYWHERE, payload=b"")
        self._is_supported, self._on_cpu_bytes = False, on_cpu_bytes
        self._answers = [client.server_module_call(order) for client in self._clients]

    @property
    def is_supported(self) -> bool:
        """Whether every server lets a lookup begin anywhere."""
        if self._answers is not None and all(a.query() for a in self._answers):
            answers, self._answers = self._answers, None
            sizes = [_cpu_bytes(answer) for answer in answers]
            self._is_supported = None not in sizes
            # The ranks' shares are alike: the smallest server is full first.
            self._on_cpu_bytes(min(size or 0 for size in sizes) * len(sizes))
        return self._is_supported and self._suffixes is not None

    def set_early(self, request: Request) -> None:
        """Its lookup is about to begin before it is known what GPU memory holds."""
        self._set(request, self._last_suffix(request, request.num_tokens))

    def set(self, request: Request, hit_tokens: int) -> None:
        """The request's lookup is about to begin.

        Args:
            hit_tokens: what GPU memory holds of the request now.
        """
        has_suffix = self._last_suffix(request, hit_tokens) > 0
        chunks = hit_tokens // self._chunk_tokens if has_suffix else 0
        self._set(request, chunks * self._chunk_tokens)

    def of(self, request_id: str) -> int:
        """Where the request's lookup begins: it knows nothing of what lies before."""
        return self._starts.get(request_id, 0)

    @contextmanager
    def beginning_at(self, start: int) -> Iterator[None]:
        """A lookup that LMCache's adapter begins inside begins there."""
        self._asking = start if self.is_supported else 0
        try:
            yield
        finally:
            self._asking = 0

    def forget(self, request_id: str) -> None:
        """There is no lookup of the request any more."""
        self._starts.pop(request_id, None)

    def reset(self) -> None:
        """What is stored is worthless."""
        if self._suffixes is not None:
            self._suffixes.clear()

    def _last_suffix(self, request: Request, tokens: int) -> int:
        if self._suffixes is None or not self.is_supported:
            return 0
        return self._suffixes.last_within(request, tokens)

    def _set(self, request: Request, start: int) -> None:
        if start:
            self._starts[request.request_id] = start
        else:
            self.forget(request.request_id)

    def _create_key(
        self, token_ids: list[int], start: int, end: int, *args: Any, **kwargs: Any
    ) -> Any:
        start = max(start, min(self._asking, end))
        return self._make_key(token_ids, start, end, *args, **kwargs)


def _cpu_bytes(answer: Any) -> float | None:
    """The server's CPU memory, 0 if it does not say; None if it knows no starts."""
    try:
        reply = answer.result(timeout=0)
        if not reply.success or not (abilities := json.loads(reply.payload)):
            return None
        return float(abilities.get("cpu_bytes", 0))
    except Exception:  # noqa: BLE001 - a server that does not know the question
        return None
