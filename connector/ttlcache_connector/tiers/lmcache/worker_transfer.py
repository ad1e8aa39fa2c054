"""LMCache's worker-driven transfer, on threads of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
    EngineDrivenTransferContext,
)

from ttlcache.clock import stopwatch_s
from ttlcache.errors import TransferError
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.transfer import Direction
from ttlcache_connector.tiers.lmcache.copier import ChunkCopier
from ttlcache_connector.tiers.lmcache.copy_thread import CopyThreads, Move

#: Seconds for which a store that has not begun trusts its slots: below LMCache's write
#: TTL (`lmcache_server.launch`).
MAX_RESERVED_S = 60.0


class ThreadedTransfer(EngineDrivenTransferContext):
    """Registered with one server: LMCache hands out slots, `copier` fills them."""

    def __init__(
        self,
        instance_id: int,
        req_client: Any,
        threads: CopyThreads,
        metrics: MetricsBuffer,
        answer_timeout_s: float,
        copier: ChunkCopier,
        on_no_answer: Callable[[], None],
    ) -> None:
        super().__init__(instance_id, req_client)
        # A server answers no request for slots of a worker that it does not know, as
        # after its restart.
        self._on_no_answer, self._unanswered = on_no_answer, 0
        self._threads = threads
        self._metrics = metrics
        self._answer_timeout_s = answer_timeout_s
        self._copier = copier
        self._device = torch.device("cpu")
        self.moves: dict[MessagingFuture[bool], Move] = {}
        # Releases of loads that have not begun: whoever takes one out has to release
        # what its lookup locked. The server does not, not even when a session ends.
        self._unread: dict[MessagingFuture[bool], Callable[[Move], bool]] = {}
        self._was_closed = False
        #: Seconds of loads that are done, by request: without their waits for other
        #: copies and for the forward pass.
        self.load_s: dict[str, float] = {}

    def register(
        self, kv_caches: dict[str, torch.Tensor], *args: Any, **kw: Any
    ) -> None:
        """
        Raises:
            TransferError: the copier cannot reach this server's memory.
        """
        super().register(kv_caches, *args, **kw)
        self._device = next(iter(kv_caches.values())).device
        self.engine_driven_context.mq_timeout = self._answer_timeout_s
        self._copier.attach(self.engine_driven_context)

    def create_recorded_event(self) -> Any:
        if self._device.type != "cuda":
            return None  # the CPU's forward pass is over when we are called
        # The mover sleeps until it.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def submit_store(
        self,
        _request_id: str,
        key: Any,
        kv_caches: dict[str, torch.Tensor],
        block_ids: list[list[int]],
        event: Any,
        blocks_in_chunk: int,
    ) -> MessagingFuture[bool]:
        (blocks,) = block_ids
        run = partial(self._store, key, blocks, event, blocks_in_chunk)
        return self._submit(run, MessagingFuture(), is_load=False)

    def submit_retrieve(
        self,
        request_id: str,
        key: Any,
        kv_caches: dict[str, torch.Tensor],
        block_ids: list[list[int]],
        event: Any,
        blocks_in_chunk: int,
        skip_first_n_tokens: int = 0,
    ) -> MessagingFuture[bool]:
        (blocks,) = block_ids
        future: MessagingFuture[bool] = MessagingFuture()
        self._unread[future] = partial(self._release, key)
        copy = partial(
            self._load,
            request_id,
            key,
            blocks,
            event,
            blocks_in_chunk,
            skip_first_n_tokens,
        )
        return self._submit(partial(self._begin, future, copy), future, is_load=True)

    def cancel_all_but(self, futures: Iterable[MessagingFuture[bool]]) -> None:
        """Give up all moves but those; their blocks may belong to others now."""
        wanted = {f: self.moves[f] for f in futures if f in self.moves}
        if len(wanted) != len(self.moves):
            for future in self.moves.keys() - wanted.keys():
                self._unread.pop(future, None)
            self.moves = wanted
            self._threads.cancel_all_but(wanted.values())

    def waited_s(self, load: MessagingFuture[bool]) -> float:
        """Since it was ordered."""
        return stopwatch_s() - self.moves[load].ordered_s if load in self.moves else 0.0

    def give_up(self, load: MessagingFuture[bool]) -> None:
        """One load, of a server that answers: nothing stays locked for it."""
        release = self._unread.pop(load, None)
        self.cancel_all_but([future for future in self.moves if future is not load])
        if release is not None:
            self._threads.loads.submit(release, lambda _: None, stays=True)

    def close(self) -> None:
        self._was_closed = True
        # A chunk with a reader keeps its memory mapped.
        with contextlib.suppress(BufferError):
            super().close()

    def _submit(
        self,
        run: Callable[[Move], bool],
        future: MessagingFuture[bool],
        *,
        is_load: bool,
    ) -> Any:
        thread = self._threads.loads if is_load else self._threads.stores
        self.moves[future] = thread.submit(run, future.set_result)
        return future

    def _store(
        self, key: Any, blocks: list[int], event: Any, per_chunk: int, move: Move
    ) -> bool:
        context = self.engine_driven_context
        # Slots of a store that is given up from here on stay reserved until LMCache's
        # write TTL: its protocol knows a commit, which shows the bytes to readers
        # whatever they are, and no way back. Eviction takes them after that.
        try:
            slots = context.prepare_store(key, self._instance_id)
        except TimeoutError:
            self._note_answer(came=False)
            raise
        self._note_answer(came=True)
        if slots is None:
            return False
        reserved_s = stopwatch_s()
        chunks, indices = slots
        if not indices:
            return True  # all of it is stored already, or there is no room for it
        blocks = [b for i in indices for b in blocks[i * per_chunk :][:per_chunk]]
        if len(blocks) != len(chunks) * per_chunk:
            raise TransferError("the server's chunks are of another size now")
        self._wait_for(event)
        if stopwatch_s() - reserved_s > MAX_RESERVED_S:
            raise TransferError("the slots may be another chunk's by now")
        with move.copying():
            self._copier.copy(
                Direction.STORE, blocks, per_chunk, chunks, move.is_wanted
            )
        ok = bool(context.commit_store(key, self._instance_id, chunks))
        if ok:
            self._count("demoted", chunks)
        return ok

    def _begin(
        self, load: MessagingFuture[bool], copy: Callable[[Move], bool], move: Move
    ) -> bool:
        # Taken out by `give_up`: its locks are not ours any more.
        return self._unread.pop(load, None) is not None and copy(move)

    def _release(self, key: Any, _: Move) -> bool:
        """What a lookup locked for a load that never began: a load without a copy."""
        if self._was_closed:
            return False  # another server's locks
        self.engine_driven_context.prepare_retrieve(key, self._instance_id)
        return bool(self.engine_driven_context.commit_retrieve(key, self._instance_id))

    def _load(
        self,
        request_id: str,
        key: Any,
        blocks: list[int],
        event: Any,
        per_chunk: int,
        skip_tokens: int,
        move: Move,
    ) -> bool:
        context, began_s = self.engine_driven_context, stopwatch_s()
        chunks = context.prepare_retrieve(key, self._instance_id)
        try:
            prepared_s = stopwatch_s()
            is_late = prepared_s - began_s >= self._answer_timeout_s
            self._note_answer(came=chunks is not None or not is_late)
            if chunks is None or len(chunks) * per_chunk != len(blocks):
                return False
            self._wait_for(event)
            began_s += stopwatch_s() - prepared_s
            with move.copying():
                self._copier.copy(
                    Direction.LOAD,
                    blocks,
                    per_chunk,
                    chunks,
                    move.is_wanted,
                    skip_tokens,
                )
        finally:
            context.commit_retrieve(key, self._instance_id)
        self._count("promoted", chunks)
        self.load_s[request_id] = stopwatch_s() - began_s
        return True

    def _note_answer(self, *, came: bool) -> None:
        self._unanswered = 0 if came else self._unanswered + 1
        if self._unanswered > 1 and not self._was_closed:
            self._on_no_answer()

    def _wait_for(self, event: Any) -> None:
        """Outside of `copying`: a copy is given up without waiting for a forward pass.

        Raises:
            TransferError: on a device there is nothing to wait for: LMCache's adapter
                gives no event while its server is away, and that may end at once.
        """
        if self._device.type == "cuda":
            # A thread begins on GPU 0, and its first call would open a context there.
            torch.cuda.set_device(self._device)
            if event is None:
                raise TransferError("no event to wait for")
        if event is not None:
            event.synchronize()

    def _count(self, direction: str, chunks: Iterable[torch.Tensor]) -> None:
        num_bytes = sum(chunk.numel() * chunk.element_size() for chunk in chunks)
        self._metrics.count("tier_bytes", direction, num_bytes)
