"""Threads that copy bytes beside the forward pass, and can be stopped.

A copy that was cancelled never touches a KV block again once `retain` or `close`
returned: the blocks may belong to another request by then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from ttlcache.clock import stopwatch_s
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
        on_progress: Callable[[], None],
        *,
        stays: bool = False,
    ) -> None:
        self.run = run
        self.done = done
        self.stays = stays
        self.cancelled = False
        self.ordered_s = stopwatch_s()
        self._copy_lock, self._on_progress = copy_lock, on_progress

    def is_wanted(self) -> bool:
        """Asked between two parts of a copy."""
        self._on_progress()
        return not self.cancelled

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
    """Does moves one after another."""

    def __init__(self, name: str) -> None:
        self._queue: deque[Move] = deque()
        self._current: Move | None = None
        self._wake = threading.Condition()
        self._copy_lock = threading.Lock()
        self._closed = False
        self._logged = False
        self._progress_s = stopwatch_s()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def stands_for_s(self) -> float:
        """Seconds since a move last began, copied a part, or ended; 0 without any."""
        is_idle = self._current is None and not self._queue
        return 0.0 if is_idle else stopwatch_s() - self._progress_s

    def _note_progress(self) -> None:
        self._progress_s = stopwatch_s()

    def submit(
        self,
        run: Callable[[Move], bool],
        done: Callable[[bool], None],
        *,
        stays: bool = False,
    ) -> Move:
        """Queue a move; never blocks."""
        move = Move(run, done, self._copy_lock, self._note_progress, stays=stays)
        with self._wake:
            if self._closed:
                move.cancelled = True
            else:
                if self._current is None and not self._queue:
                    self._note_progress()
                self._queue.append(move)
                self._wake.notify()
        if move.cancelled:
            done(False)
        return move

    def cancel_all_but(self, wanted: Collection[Move]) -> None:
        """Cancel all moves but those; returns when none of them copies any more."""
        keep = {id(move) for move in wanted}
        with self._wake:
            if not self._closed:
                keep |= {id(move) for move in self._queue if move.stays}
            dropped = [move for move in self._queue if id(move) not in keep]
            self._queue = deque(move for move in self._queue if id(move) in keep)
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
        self.cancel_all_but(())

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._queue or self._closed):
                    self._wake.wait()
                if self._closed:
                    return
                move = self._queue.popleft()
                self._current = move
            self._note_progress()
            ok = self._run(move)
            self._note_progress()
            with self._wake:
                self._current = None
            move.done(ok)

    def _run(self, move: Move) -> bool:
        try:
            return move.run(move)
        except Cancelled:
            return False
        except Exception:
            if not (self._logged or move.cancelled):
                self._logged = True
                log.warning(
                    "ttlcache: a copy to or from the lower tier failed (logged once)",
                    exc_info=True,
                )
            return False


class CopyThreads:
    """One for loads, one for stores: a load never waits for a store."""

    def __init__(self) -> None:
        self.loads = CopyThread("ttlcache-loads")
        self.stores = CopyThread("ttlcache-stores")

    def cancel_all_but(self, wanted: Collection[Move]) -> None:
        """See `CopyThread.cancel_all_but`."""
        self.loads.cancel_all_but(wanted)
        self.stores.cancel_all_but(wanted)

    def close(self) -> None:
        self.loads.close()
        self.stores.close()
