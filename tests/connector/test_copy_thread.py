"""A copy that was given up never touches a block again."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ttlcache_connector.tiers.lmcache import copy_thread
from ttlcache_connector.tiers.lmcache.copy_thread import CopyThread, CopyThreads, Move

WAIT_S = 20.0


@pytest.fixture
def thread() -> Iterator[CopyThread]:
    thread = CopyThread("test-move")
    yield thread
    thread.close()


class Job:
    """A move that stops before its copy, or in it, until it is let go."""

    def __init__(
        self, thread: CopyThread, *, goes: bool = False, stop_in_copy: bool = False
    ) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.copied, self.ended = threading.Event(), threading.Event()
        self.results: list[bool] = []
        self._in_copy = stop_in_copy
        if goes:
            self.go.set()
        self.move = thread.submit(self.run, self.done)

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

    def ends(self) -> bool:
        """How it ended."""
        assert self.ended.wait(WAIT_S)
        (ok,) = self.results
        return ok

    def _stop(self) -> None:
        self.begun.set()
        assert self.go.wait(WAIT_S)


def begun(thread: CopyThread, **options: bool) -> Job:
    job = Job(thread, **options)
    assert job.begun.wait(WAIT_S)
    return job


def test_a_load_does_not_wait_for_a_store():
    threads = CopyThreads()
    store = begun(threads.stores)
    assert Job(threads.loads, goes=True).ends()
    store.go.set()
    assert store.ends()
    threads.close()


def test_retain_waits_for_the_copy_under_way(thread):
    copying = begun(thread, stop_in_copy=True)
    returned = threading.Event()

    def give_up() -> None:
        thread.cancel_all_but(())
        returned.set()

    other = threading.Thread(target=give_up)
    other.start()
    assert not returned.wait(0.05)
    copying.go.set()
    assert returned.wait(WAIT_S)
    assert copying.copied.is_set()
    other.join()


def test_a_failing_move_is_a_miss_and_the_thread_goes_on(thread):
    def fail(move: Move) -> bool:
        raise TimeoutError("the server is gone")

    results: list[bool] = []
    thread.submit(fail, results.append)
    assert Job(thread, goes=True).ends()
    assert results == [False]


def test_after_close_everything_is_a_miss(thread):
    thread.close()
    assert Job(thread).results == [False]


def test_a_move_that_waits_for_others_does_not_stand_still(thread, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(copy_thread, "stopwatch_s", lambda: now_s[0])
    first = begun(thread)
    now_s[0] += 3.0
    assert first.move.is_wanted()
    now_s[0] += 3.0
    assert thread.stands_for_s() == 3.0
    first.go.set()
    assert Job(thread, goes=True).ends()
    now_s[0] += 60.0
    assert thread.stands_for_s() == 0.0, "there is none"
