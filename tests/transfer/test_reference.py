"""The reference engine's own promise: a wait ends in time, whatever the copies do."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from ttlcache.transfer import (
    BlockLayout,
    Direction,
    ReferenceEngine,
    base,
    plan_copies,
)
from ttlcache.transfer import reference as module
from ttlcache.transfer.base import Failure
from ttlcache.transfer.layout import Plane


def test_a_slow_copy_ends_by_itself_and_close_drops_what_has_not_begun(monkeypatch):
    began, goes_on = threading.Event(), threading.Event()
    memmove = ctypes.memmove

    def slow(*piece):
        began.set()
        assert goes_on.wait(10.0)
        memmove(*piece)

    monkeypatch.setattr(module.ctypes, "memmove", slow)
    paged, host = np.full(512, 7, np.uint8), np.zeros(512, np.uint8)
    layout = BlockLayout.from_planes("test", 1, [Plane(paged.ctypes.data, 512, 512)])
    plan = plan_copies(Direction.STORE, layout, [0], [host.ctypes.data], 1)
    engine = ReferenceEngine()
    first, second = engine.submit(plan), engine.submit(plan)
    assert began.wait(10.0)
    assert not engine.flush(0.01)
    assert engine.poll() == []
    monkeypatch.setattr(base, "CLOSE_TIMEOUT_S", 0.05)
    assert not engine.close()  # its memory must stay
    ended = engine.poll()
    assert [(o.ticket, o.failure) for o in ended] == [(second, Failure.CLOSED)]
    goes_on.set()
    assert engine.flush(10.0)
    assert engine.close()
    assert (host == 7).all()
    assert [(o.ticket, o.failure) for o in engine.poll()] == [(first, None)]
