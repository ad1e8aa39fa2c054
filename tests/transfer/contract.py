"""The contract of a transfer engine as a test suite.

    class TestMine(TransferContract):
        def make_engine(self):
            return Mine()

Engines whose memory is not this process's also override `make_arena`.
"""

import ctypes
import gc
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.transfer.cases import ARENA_BYTES, cases, example_case
from ttlcache.transfer.base import Failure
from ttlcache.transfer.plan import Direction

WAIT_S = 60.0
EXAMPLES = 30


class Arena:
    """One stretch of memory that an engine can reach; the default: this process's."""

    num_bytes = ARENA_BYTES

    def __init__(self, address=None):
        self.address = address or self._own()

    def _own(self):
        self._array = np.zeros(ARENA_BYTES + 4096, np.uint8)
        # Whole pages: what registering with a device wants.
        return -(-self._array.ctypes.data // 4096) * 4096

    def write(self, data):
        """Fill the whole arena."""
        ctypes.memmove(self.address, data.ctypes.data, self.num_bytes)

    def read(self):
        """All of it."""
        held = ctypes.string_at(self.address, self.num_bytes)
        return np.frombuffer(held, np.uint8).copy()


class TransferContract:
    """Subclass and return an engine from `make_engine`."""

    def make_engine(self):
        """A fresh engine."""
        raise NotImplementedError

    def make_arena(self, engine, device):
        """`ARENA_BYTES` of the paged side (`device`) or of the host side."""
        return Arena()

    @pytest.fixture
    def bench(self):
        engine = self.make_engine()
        try:
            paged = self.make_arena(engine, device=True)
            yield Bench(engine, paged, self.make_arena(engine, device=False))
        finally:
            engine.close()

    def test_every_byte_arrives_and_no_other_changes(self, bench):
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(cases(bench.paged.address, bench.host.address))
        def check(case):
            bench.check(case)

        check()

    def test_nothing_to_copy(self, bench):
        assert bench.run(bench.case(ids=()).plan()).num_bytes == 0

    def test_each_plan_is_reported_once_and_in_order(self, bench):
        case = bench.case()
        tickets = [bench.engine.submit(case.plan()) for _ in range(50)]
        assert len(set(tickets)) == len(tickets)
        outcomes = bench.finish()
        assert [outcome.ticket for outcome in outcomes] == tickets
        assert all(o.ok and o.num_bytes == case.num_bytes for o in outcomes)
        assert bench.engine.poll() == []

    def test_later_plans_of_a_direction_win(self, bench):
        """The same blocks loaded from two chunks: the second one's bytes stay."""
        first = bench.case(direction=Direction.LOAD)
        elsewhere = tuple(offset + ARENA_BYTES // 2 for offset in first.chunk_offsets)
        second = replace(first, chunk_offsets=elsewhere)
        paged, host = bench.fill(3)
        bench.engine.submit(first.plan())
        bench.engine.submit(second.plan())
        assert all(outcome.ok for outcome in bench.finish())
        expected = second.expected(first.expected(paged, host)[0], host)[0]
        np.testing.assert_array_equal(bench.paged.read(), expected)

    def test_plans_under_way_do_not_disturb_each_other(self, bench):
        paged, host = bench.fill(4)
        for number in range(24):
            ids = ((7 * number) % 12, (7 * number + 5) % 12)
            case = replace(bench.case(ids), chunk_offsets=(number * 8_192,))
            bench.engine.submit(case.plan())
            host = case.expected(paged, host)[1]
        assert all(outcome.ok for outcome in bench.finish())
        np.testing.assert_array_equal(bench.host.read(), host)

    def test_many_threads_submit(self, bench):
        case = bench.case()
        tickets = []

        def submit():
            tickets.extend(bench.engine.submit(case.plan()) for _ in range(20))

        threads = [threading.Thread(target=submit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen = [outcome.ticket for outcome in bench.finish()]
        assert sorted(seen) == sorted(tickets)

    def test_what_is_not_wanted_is_not_copied(self, bench):
        plan, answers = bench.case().plan(), [True, False]
        tickets = [
            bench.engine.submit(plan, is_wanted=lambda: False),
            bench.engine.submit(plan, is_wanted=lambda: answers.pop(0)),
            bench.engine.submit(plan),
        ]
        ended = bench.finish()
        assert [outcome.ticket for outcome in ended] == tickets
        assert ended[0].failure is Failure.CANCELLED
        assert ended[1].ok
        assert ended[2].ok
        assert answers == [False]  # a plan of one part is asked for once

    def test_a_plan_may_be_given_up_under_way(self, bench):
        """Parts of a thousandth: what was copied is a beginning of the plan."""
        case, left = bench.case(), [True, True]
        with pytest.MonkeyPatch.context() as patch:
            for module in ("reference", "cupy_engine"):
                patch.setattr(f"ttlcache.transfer.{module}.PART_BYTES", 1_040)
            paged, host = bench.fill(6)
            bench.engine.submit(
                case.plan(), is_wanted=lambda: bool(left and left.pop())
            )
            (outcome,) = bench.finish()
        assert outcome.failure is Failure.CANCELLED
        changed = np.flatnonzero(bench.host.read() != host)
        assert 0 < len(changed) <= 3 * 1_040
        planned = np.flatnonzero(case.expected(paged, host)[1] != host)
        assert np.isin(changed, planned).all()

    def test_owners_live_until_the_outcome_and_no_longer(self, bench):
        class Owner:
            pass

        owner = Owner()
        gone = weakref.ref(owner)
        bench.engine.submit(bench.case().plan(owners=(owner,)))
        del owner
        assert all(outcome.ok for outcome in bench.finish())
        gc.collect()
        assert gone() is None

    def test_after_close_plans_fail_and_nothing_is_lost(self, bench):
        case = bench.case()
        tickets = [bench.engine.submit(case.plan()) for _ in range(20)]
        bench.engine.close()
        bench.engine.close()
        tickets.append(bench.engine.submit(case.plan()))
        outcomes = bench.engine.poll()
        assert sorted(o.ticket for o in outcomes) == tickets
        late = {o.ticket: o for o in outcomes}[tickets[-1]]
        assert late.failure is Failure.CLOSED
        assert {o.failure for o in outcomes} <= {None, Failure.CLOSED}


class Bench:
    """An engine with memory on both sides."""

    def __init__(self, engine, paged, host):
        self.engine, self.paged, self.host = engine, paged, host

    def case(self, *args, **more):
        return example_case(self.paged.address, self.host.address, *args, **more)

    def fill(self, seed):
        """Random bytes on both sides, returned."""
        random = np.random.default_rng(seed)
        sides = random.integers(0, 256, (2, ARENA_BYTES), np.uint8)
        self.paged.write(sides[0])
        self.host.write(sides[1])
        return sides[0], sides[1]

    def finish(self):
        assert self.engine.flush(WAIT_S)
        return self.engine.poll()

    def run(self, plan):
        ticket = self.engine.submit(plan)
        (outcome,) = self.finish()
        assert outcome.ticket == ticket
        assert outcome.ok, outcome.detail
        return outcome

    def check(self, case):
        paged, host = self.fill(case.seed)
        assert self.run(case.plan()).num_bytes == case.num_bytes
        expected_paged, expected_host = case.expected(paged, host)
        np.testing.assert_array_equal(self.paged.read(), expected_paged)
        np.testing.assert_array_equal(self.host.read(), expected_host)
