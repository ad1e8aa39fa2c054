"""What plain vLLM would still have before it, for prefills that pins spared."""

from __future__ import annotations

from ttlcache.clock import VirtualClock
from ttlcache.estimators.lru_backlog import Backlog


def test_idle_seconds_work_it_off_in_proportion():
    clock = VirtualClock()
    backlog = Backlog(clock)
    backlog.on_busy()
    backlog.on_saved(1000, 4.0)
    clock.advance(10.0)
    assert backlog.tokens == 1000, "the engine was busy"
    backlog.on_idle()
    clock.advance(1.0)
    backlog.on_busy()
    assert backlog.tokens == 750
    backlog.on_busy()  # another request: idle no more
    clock.advance(5.0)
    backlog.on_busy()
    assert backlog.tokens == 750


def test_a_long_rest_clears_it():
    clock = VirtualClock()
    backlog = Backlog(clock)
    backlog.on_busy()
    backlog.on_saved(1000, 4.0)
    backlog.on_idle()
    clock.advance(5.0)
    backlog.on_busy()
    assert backlog.tokens == 0


def test_without_a_price_nothing_is_left_after_a_rest():
    backlog = Backlog(VirtualClock())
    backlog.on_busy()
    backlog.on_saved(1000, 0.0)
    backlog.on_idle()
    backlog.on_busy()
    assert backlog.tokens == 0
