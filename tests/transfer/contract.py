"""The contract of a transfer engine as a test suite.

    class TestMine(TransferContract):
        def make_engine(self):
            return Mine()

Engines whose memory is not this process's also override `make_arena`.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray

from tests.transfer.cases import ARENA_BYTES, Case, cases, example_case
from ttlcache.transfer.base import Failure, Outcome, TransferEngine
from ttlcache.transfer.plan import CopyPlan, Direction

Bytes = NDArray[np.uint8]
WAIT_S = 60.0
EXAMPLES = 30


class Arena:
    """One stretch of memory that an engine can reach; the default: this process's."""

    def __init__(self, num_bytes: int = ARENA_BYTES) -> None:
        self._array = np.zeros(num_bytes + 256, np.uint8)
        self.num_bytes = num_bytes
        self.address = -(-self._array.ctypes.data // 256) * 256

    def write(self, data: Bytes) -> None:
        """Fill the whole arena."""
        ctypes.memmove(self.address, data.ctypes.data, self.num_bytes)

    def read(self) -> Bytes:
        """All of it."""
        return np.frombuffer(
            ctypes.string_at(self.address, self.num_bytes), np.uint8
        ).copy()


class TransferContract:
    """Subclass and return an engine from `make_engine`."""

    def make_engine(self) -> TransferEngine:
        """A fresh engine."""
        raise NotImplementedError

    def make_arena(self, engine: TransferEngine, device: bool) -> Arena:
        """`ARENA_BYTES` of the paged side (`device`) or of the host side."""
        return Arena()

    @pytest.fixture
    def bench(self) -> Iterator[Bench]:
        engine = self.make_engine()
        try:
            paged = self.make_arena(engine, device=True)
            yield Bench(engine, paged, self.make_arena(engine, device=False))
        finally:
            engine.close()

    def test_every_byte_arrives_and_no_other_changes(self, bench: Bench) -> None:
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(cases(bench.paged.address, bench.host.address))
        def check(case: Case) -> None:
            bench.check(case)

        check()

    def test_a_round_trip_into_other_blocks(self, bench: Bench) -> None:
        for seed in range(5):
            bench.round_trip(seed)

    def test_nothing_to_copy(self, bench: Bench) -> None:
        case = example_case(bench.paged.address, bench.host.address, ids=())
        assert bench.run(case.plan()).num_bytes == 0

    def test_each_plan_is_reported_once_and_in_order(self, bench: Bench) -> None:
        case = example_case(bench.paged.address, bench.host.address)
        tickets = [bench.engine.submit(case.plan()) for _ in range(50)]
        assert len(set(tickets)) == len(tickets)
        outcomes = bench.finish()
        assert [outcome.ticket for outcome in outcomes] == tickets
        assert all(o.ok and o.num_bytes == case.num_bytes for o in outcomes)
        assert bench.engine.poll() == []

    def test_later_plans_of_a_direction_win(self, bench: Bench) -> None:
        """The same blocks loaded from two chunks: the second one's bytes stay."""
        first = example_case(
            bench.paged.address, bench.host.address, direction=Direction.LOAD
        )
        elsewhere = tuple(offset + ARENA_BYTES // 2 for offset in first.chunk_offsets)
        second = replace(first, chunk_offsets=elsewhere)
        paged, host = bench.fill(3)
        bench.engine.submit(first.plan())
        bench.engine.submit(second.plan())
        assert all(outcome.ok for outcome in bench.finish())
        expected = second.expected(first.expected(paged, host)[0], host)[0]
        np.testing.assert_array_equal(bench.paged.read(), expected)

    def test_plans_under_way_do_not_disturb_each_other(self, bench: Bench) -> None:
        base = example_case(bench.paged.address, bench.host.address)
        stores = [
            replace(
                base,
                ids=((7 * number) % 12, (7 * number + 5) % 12),
                chunk_offsets=(number * 8_192,),
            )
            for number in range(24)
        ]
        paged, host = bench.fill(4)
        for case in stores:
            bench.engine.submit(case.plan())
            host = case.expected(paged, host)[1]
        assert all(outcome.ok for outcome in bench.finish())
        np.testing.assert_array_equal(bench.host.read(), host)

    def test_many_threads_submit(self, bench: Bench) -> None:
        case = example_case(bench.paged.address, bench.host.address)
        tickets: list[int] = []

        def submit() -> None:
            tickets.extend(bench.engine.submit(case.plan()) for _ in range(20))

        threads = [threading.Thread(target=submit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen = [outcome.ticket for outcome in bench.finish()]
        assert sorted(seen) == sorted(tickets)

    def test_what_is_not_wanted_is_not_copied(self, bench: Bench) -> None:
        case = example_case(bench.paged.address, bench.host.address)
        answers = [True, False]
        tickets = [
            bench.engine.submit(case.plan(), is_wanted=lambda: False),
            bench.engine.submit(case.plan(), is_wanted=lambda: answers.pop(0)),
            bench.engine.submit(case.plan()),
        ]
        ended = bench.finish()
        assert [outcome.ticket for outcome in ended] == tickets
        assert ended[0].failure is Failure.CANCELLED
        assert ended[1].ok
        assert ended[2].ok
        assert answers == [False]  # a plan of one part is asked for once

    def test_a_plan_may_be_given_up_under_way(self, bench: Bench) -> None:
        """Parts of a thousandth: what was copied is a beginning of the plan."""
        case = example_case(bench.paged.address, bench.host.address)
        left = [True, True]
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
        assert np.isin(
            changed, np.flatnonzero(case.expected(paged, host)[1] != host)
        ).all()

    def test_owners_live_until_the_outcome_and_no_longer(self, bench: Bench) -> None:
        class Owner:
            pass

        owner = Owner()
        gone = weakref.ref(owner)
        case = example_case(bench.paged.address, bench.host.address)
        bench.engine.submit(case.plan(owners=(owner,)))
        del owner
        assert all(outcome.ok for outcome in bench.finish())
        gc.collect()
        assert gone() is None

    def test_after_close_plans_fail_and_nothing_is_lost(self, bench: Bench) -> None:
        case = example_case(bench.paged.address, bench.host.address)
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

    def __init__(self, engine: TransferEngine, paged: Arena, host: Arena) -> None:
        self.engine, self.paged, self.host = engine, paged, host

    def fill(self, seed: int) -> tuple[Bytes, Bytes]:
        """Random bytes on both sides, returned."""
        random = np.random.default_rng(seed)
        sides = random.integers(0, 256, (2, ARENA_BYTES), np.uint8)
        self.paged.write(sides[0])
        self.host.write(sides[1])
        return sides[0], sides[1]

    def finish(self) -> list[Outcome]:
        assert self.engine.flush(WAIT_S)
        return self.engine.poll()

    def run(self, plan: CopyPlan) -> Outcome:
        ticket = self.engine.submit(plan)
        (outcome,) = self.finish()
        assert outcome.ticket == ticket
        assert outcome.ok, outcome.detail
        return outcome

    def check(self, case: Case) -> None:
        paged, host = self.fill(case.seed)
        assert self.run(case.plan()).num_bytes == case.num_bytes
        expected_paged, expected_host = case.expected(paged, host)
        np.testing.assert_array_equal(self.paged.read(), expected_paged)
        np.testing.assert_array_equal(self.host.read(), expected_host)

    def round_trip(self, seed: int) -> None:
        """Store blocks, load them into others: same bytes."""
        order = np.random.default_rng(seed).permutation(12)
        ids, others = order[:5].tolist(), order[5:10].tolist()
        sides = (self.paged.address, self.host.address)
        store = example_case(*sides, ids=ids)
        load = example_case(*sides, ids=others, direction=Direction.LOAD)
        paged, _ = self.fill(seed)
        self.run(store.plan())
        self.run(load.plan())
        after = self.paged.read()
        for old, new in zip(ids, others, strict=True):
            for base, stride, size in store.planes:
                was, now = base + old * stride, base + new * stride
                np.testing.assert_array_equal(
                    after[now : now + size], paged[was : was + size]
                )
