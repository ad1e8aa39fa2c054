"""Loads that end right after they were asked for: a worker waits for them, a little."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from lmcache.v1.multiprocess.futures import MessagingFuture

from ttlcache.clock import VirtualClock
from ttlcache_connector.tiers.lmcache.worker import MAX_WAIT_S, WorkerHalf


class Load(MessagingFuture[bool]):
    """Ends after some seconds of being waited for; the clock is virtual."""

    def __init__(self, clock, needs_s):
        super().__init__()
        self._clock = clock
        self._needs_s = needs_s

    def wait(self, timeout=None):
        took_s = min(timeout, self._needs_s)
        self._clock.advance(took_s)
        self._needs_s -= took_s
        if self._needs_s <= 1e-12:
            self.set_result(True)
        return self.query()


class Worker(WorkerHalf):
    """What `poll` does around LMCache's adapter; what ended is written down."""

    def __init__(self, **needs_s):
        self.clock = VirtualClock()
        self._now_s = self.clock.now_s
        loads = {name: (Load(self.clock, s), []) for name, s in needs_s.items()}
        self._adapter = SimpleNamespace(
            retrieve_futures=loads, store_futures={}, transfer_ctx=None
        )
        self._inner = SimpleNamespace(
            get_transfer_results=self._results,
            get_block_ids_with_load_errors=set,
        )
        self._since_s = dict.fromkeys(loads, 0.0)
        self._waited_s = {}

    def _results(self, finished_ids):
        loads = self._adapter.retrieve_futures
        ended = {name for name, (future, _) in loads.items() if future.query()}
        for name in ended:
            del loads[name]
        return SimpleNamespace(finished_recving=ended, failed_recving=set())

    def step(self):
        """Loads that ended, seconds that the step waited for them."""
        began_s = self.clock.now_s()
        received = self.poll(())
        return sorted(received.received), self.clock.now_s() - began_s


def test_a_load_that_is_about_to_end_costs_no_further_step():
    ended, waited_s = Worker(a=MAX_WAIT_S / 2, b=MAX_WAIT_S / 4).step()
    assert ended == ["a", "b"]
    assert waited_s == pytest.approx(MAX_WAIT_S * 3 / 4)


def test_all_loads_of_a_step_together_are_not_waited_for_longer():
    worker = Worker(**{f"load-{n}": MAX_WAIT_S * 2 / 3 for n in range(9)})
    _, waited_s = worker.step()
    assert waited_s == pytest.approx(MAX_WAIT_S)


def test_a_long_load_is_not_waited_for_in_every_step():
    worker = Worker(disk=100 * MAX_WAIT_S)
    waited_s = [worker.step()[1] for _ in range(5)]
    assert sum(waited_s) == pytest.approx(MAX_WAIT_S)


def test_nothing_is_kept_of_loads_that_ended():
    worker = Worker(a=MAX_WAIT_S / 2)
    worker.step()
    assert worker._waited_s == worker._since_s == {}


def test_a_step_without_loads_waits_for_nothing():
    assert Worker().step() == ([], 0.0)
