"""The reference engine's own promise: whoever waits copies, and stops in time."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from ttlcache.transfer import BlockLayout, Direction, ReferenceEngine, plan_copies
from ttlcache.transfer import reference as module
from ttlcache.transfer.base import Failure
from ttlcache.transfer.layout import Plane

BLOCK = 512
COUNT = 40


class OnlyWaiters(ReferenceEngine):
    """Without the engine's own thread: nothing is copied but in `flush`."""

    def _work(self):
        return


@pytest.fixture
def slow_clock(monkeypatch):
    """Every look at it is a second later."""
    seconds = itertools.count()
    monkeypatch.setattr(module, "stopwatch_s", lambda: float(next(seconds)))


class Blocks:
    def __init__(self):
        self.paged = np.random.default_rng(3).integers(0, 256, COUNT * BLOCK, np.uint8)
        self.host = np.zeros_like(self.paged)

    def plan(self):
        """One piece a block: no two adjoin."""
        layout = BlockLayout.from_planes(
            "test", COUNT, [Plane(self.paged.ctypes.data, BLOCK, BLOCK)]
        )
        ids = range(COUNT - 1, -1, -1)
        chunks = [self.host.ctypes.data]
        return plan_copies(Direction.STORE, layout, ids, chunks, COUNT)

    @property
    def copied(self):
        there = self.host.reshape(COUNT, BLOCK)
        return int((there == self.paged.reshape(COUNT, BLOCK)[::-1]).all(1).sum())


def test_whoever_waits_copies():
    blocks, engine = Blocks(), OnlyWaiters()
    ticket = engine.submit(blocks.plan())
    assert blocks.copied == 0
    assert engine.flush(60.0)
    assert blocks.copied == COUNT
    (outcome,) = engine.poll()
    assert (outcome.ticket, outcome.ok) == (ticket, True)
    assert outcome.num_bytes == COUNT * BLOCK
    engine.close()


def test_a_wait_that_is_over_ends_within_a_piece_and_the_next_goes_on(slow_clock):
    blocks, engine = Blocks(), OnlyWaiters()
    engine.submit(blocks.plan())
    assert not engine.flush(10.0)
    assert 0 < blocks.copied < COUNT
    assert engine.poll() == []
    assert engine.flush(10_000.0)
    assert blocks.copied == COUNT
    assert len(engine.poll()) == 1
    engine.close()


def test_what_a_wait_left_half_done_the_engine_ends_by_itself(slow_clock):
    blocks, engine = Blocks(), ReferenceEngine()
    engine.submit(blocks.plan())
    engine.flush(10.0)
    while not (ended := engine.poll()):
        pass
    assert ended[0].ok
    assert blocks.copied == COUNT
    engine.close()


def test_close_ends_what_has_begun_and_drops_the_rest(slow_clock):
    blocks, others, engine = Blocks(), Blocks(), OnlyWaiters()
    engine.submit(blocks.plan())
    engine.submit(others.plan())
    assert not engine.flush(10.0)
    engine.close()
    assert blocks.copied == COUNT
    assert others.copied == 0
    failures = sorted(str(outcome.failure) for outcome in engine.poll())
    assert failures == sorted([str(None), str(Failure.CLOSED)])


def test_a_copy_that_raises_leaves_nobody_waiting(monkeypatch):
    blocks, engine = Blocks(), ReferenceEngine()
    began, goes_on = threading.Event(), threading.Event()

    def broken(job, until_s):
        began.set()
        goes_on.wait(10.0)
        raise RuntimeError("no copy")

    monkeypatch.setattr(module, "_copy", broken)
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    engine.submit(blocks.plan())
    assert began.wait(10.0)
    closer = threading.Thread(target=engine.close, daemon=True)
    closer.start()
    closer.join(0.1)
    goes_on.set()
    closer.join(10.0)
    assert not closer.is_alive()
