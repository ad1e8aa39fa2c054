"""One thread that copies bytes beside the forward pass, and can be stopped.

A copy that was cancelled never touches a KV block again once `retain` or `close`
returned: the blocks may belong to another request by then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from ttlcache_connector.log import logger

log = logger(__name__)


class Cancelled(Exception):
    """The copy is not wanted any more."""


class Move:
    """One copy, first asked for and then done on the thread.

    run: does it; touches KV blocks only inside `copying`.
    done: called with its result, False where it failed or was cancelled.
    stays: touches no KV block, and is done even when it is not wanted any more.
    """

    def __init__(
        self,
        run: Callable[[Move], bool],
        done: Callable[[bool], None],
        copy_lock: threading.Lock,
        *,
        stays: bool = False,
    ) -> None:
        self.run = run
        self.done = done
        self.stays = stays
        self.cancelled = False
        self._copy_lock = copy_lock

    @contextmanager
    def copying(self) -> Iterator[None]:
        """The only place from which KV blocks may be read or written.

        Raises:
            Cancelled: they may not be touched any more.
        """
        with self._copy_lock:
            if self.cancelled:
                raise Cancelled
            yield


class CopyThread:
    """Does moves one after another; loads before stores."""

    def __init__(self, name: str) -> None:
        self._loads: deque[Move] = deque()
        self._stores: deque[Move] = deque()
        self._current: Move | None = None
        self._wake = threading.Condition()
        self._copy_lock = threading.Lock()
        self._closed = False
        self._logged = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        run: Callable[[Move], bool],
        done: Callable[[bool], None],
        *,
        is_load: bool,
        stays: bool = False,
    ) -> Move:
        """Queue a move; never blocks."""
        move = Move(run, done, self._copy_lock, stays=stays)
        with self._wake:
            if self._closed:
                move.cancelled = True
            else:
                (self._loads if is_load else self._stores).append(move)
                self._wake.notify()
        if move.cancelled:
            done(False)
        return move

    def retain(self, wanted: Collection[Move]) -> None:
        """Cancel all moves but those; returns when none of them copies any more."""
        keep = {id(move) for move in wanted}
        with self._wake:
            if not self._closed:
                queued = (*self._loads, *self._stores)
                keep |= {id(move) for move in queued if move.stays}
            dropped = [m for m in (*self._loads, *self._stores) if id(m) not in keep]
            for queue in (self._loads, self._stores):
                kept = [m for m in queue if id(m) in keep]
                queue.clear()
                queue.extend(kept)
            current = self._current
            if current is not None and id(current) not in keep:
                current.cancelled = True
            else:
                current = None
        for move in dropped:
            move.cancelled = True
            move.done(False)
        if current is not None:
            with self._copy_lock:
                pass

    def close(self) -> None:
        """Cancel everything and end the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self.retain(())

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._loads or self._stores or self._closed):
                    self._wake.wait()
                if self._closed:
                    return
                move = (self._loads or self._stores).popleft()
                self._current = move
            ok = self._run(move)
            with self._wake:
                self._current = None
            move.done(ok)

    def _run(self, move: Move) -> bool:
        try:
            return move.run(move)
        except Cancelled:
            return False
        except Exception:
            if not self._logged:
                self._logged = True
                log.warning(
                    "ttlcache: a copy to or from the lower tier failed (logged once)",
                    exc_info=True,
                )
            return False
