"""A copy that was given up never touches a block again."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ttlcache_connector.copy.copy_thread import CopyThread, CopyThreads, Move

WAIT_S = 20.0


@pytest.fixture
def thread() -> Iterator[CopyThread]:
    thread = CopyThread("test-move")
    yield thread
    thread.close()


class Job:
    """A move that stops before its copy, or in it, until it is let go."""

    def __init__(self, stop_in_copy: bool = False) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.copied, self.results = threading.Event(), []
        self._in_copy = stop_in_copy
        self.ended = threading.Event()

    def run(self, move: Move) -> bool:
        if not self._in_copy:
            self._stop()
        with move.copying():
            if self._in_copy:
                self._stop()
            self.copied.set()
        return True

    def done(self, ok: bool) -> None:
        self.results.append(ok)
        self.ended.set()

    def _stop(self) -> None:
        self.begun.set()
        assert self.go.wait(WAIT_S)


def test_a_load_does_not_wait_for_a_store():
    threads = CopyThreads()
    store, load = Job(), Job()
    threads.stores.submit(store.run, store.done)
    assert store.begun.wait(WAIT_S)
    load.go.set()
    threads.loads.submit(load.run, load.done)
    assert load.ended.wait(WAIT_S)
    store.go.set()
    assert store.ended.wait(WAIT_S)
    assert store.results == load.results == [True]
    threads.close()


def test_a_cancelled_move_that_has_not_copied_never_does(thread):
    waiting, queued = Job(), Job()
    thread.submit(waiting.run, waiting.done)
    assert waiting.begun.wait(WAIT_S)
    thread.submit(queued.run, queued.done)
    thread.retain(())
    assert queued.results == [False]
    waiting.go.set()
    assert waiting.ended.wait(WAIT_S)
    assert waiting.results == [False]
    assert not waiting.copied.is_set()
    assert not queued.copied.is_set()


def test_retain_waits_for_the_copy_under_way(thread):
    copying = Job(stop_in_copy=True)
    thread.submit(copying.run, copying.done)
    assert copying.begun.wait(WAIT_S)
    returned = threading.Event()

    def give_up() -> None:
        thread.retain(())
        returned.set()

    other = threading.Thread(target=give_up)
    other.start()
    assert not returned.wait(0.05)
    copying.go.set()
    assert returned.wait(WAIT_S)
    assert copying.copied.is_set()
    other.join()


def test_wanted_moves_are_kept(thread):
    blocker, wanted, unwanted = Job(), Job(), Job()
    thread.submit(blocker.run, blocker.done)
    assert blocker.begun.wait(WAIT_S)
    wanted.go.set()
    keep = [thread.submit(wanted.run, wanted.done)]
    thread.submit(unwanted.run, unwanted.done)
    thread.retain(keep)
    blocker.go.set()
    assert wanted.ended.wait(WAIT_S)
    assert wanted.results == [True]
    assert unwanted.results == [False]


def test_a_failing_move_is_a_miss_and_the_thread_goes_on(thread):
    def fail(move: Move) -> bool:
        raise TimeoutError("the server is gone")

    bad, good = Job(), Job()
    good.go.set()
    thread.submit(fail, bad.done)
    thread.submit(good.run, good.done)
    assert good.ended.wait(WAIT_S)
    assert bad.results == [False]
    assert good.results == [True]


def test_after_close_everything_is_a_miss(thread):
    thread.close()
    late = Job()
    thread.submit(late.run, late.done)
    assert late.results == [False]
