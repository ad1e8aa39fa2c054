"""Least expected work first: levels, pins, sub-agents, and who learns."""

from __future__ import annotations

import pytest

from ttlcache.scheduling.ordering import LeastWork, QueuedTurn
from ttlcache.testing import FakeEngine
from ttlcache.types import Urgency


def queued(program, work_left_s, *, claimable=False, preempted=False):
    return QueuedTurn(
        user_priority=0,
        preempted=preempted,
        claimable=claimable,
        place_seq=program,
        request_seq=10 + program,
        work_left_s=work_left_s,
    )


def served(*turns):
    return [t.place_seq for t in sorted(turns, key=LeastWork().key)]


@pytest.mark.parametrize(
    ("work_left_s", "level"),
    [(None, 0), (0.0, 1), (0.1, 1), (0.14, 1), (0.151, 2), (0.23, 3), (1e300, 64)],
)
def test_levels_grow_by_half(work_left_s, level):
    assert LeastWork().level(work_left_s) == level


def test_less_work_first_and_equals_by_arrival():
    assert served(queued(1, 90.0), queued(2, 10.0), queued(3, 30.0)) == [2, 3, 1]
    assert served(queued(2, 20.0), queued(1, 21.0)) == [1, 2]  # of one level
    assert served(queued(2, None), queued(1, None), queued(3, 0.1)) == [1, 2, 3]


def test_pins_and_preempted_turns_come_first_as_in_the_paper():
    pinned = queued(1, 90.0, claimable=True)
    assert served(queued(2, 1.0), pinned) == [1, 2]
    assert served(pinned, queued(3, 500.0, preempted=True)) == [3, 1]


def make_engine(pool_blocks=400):
    config = {
        "policy": "fixed",
        "policy_options": {"ttl_s": 1000.0},
        "max_ttl_s": 1000.0,
        "max_pinned_fraction": 1.0,
        "ordering": "least-work",
    }
    return FakeEngine(config, pool_blocks=pool_blocks, block_tokens=1)


def run(engine, program, turns, output=4, end=True, **hints):
    """A whole program, each turn 3 new tokens."""
    context = []
    for index in range(turns):
        if end and index == turns - 1:
            hints = {**hints, "is_last_step": True}
        context += [1000 * ord(program[0]) + len(context) + i for i in range(3)]
        request_id = f"{program}-{index}"
        engine.arrive(request_id, context, program=program, **hints)
        assert engine.admit(request_id)
        assert engine.decode(request_id, [7])
        for _ in range(output - 1):
            engine.clock.advance(0.02)
            assert engine.decode(request_id, [7])
        engine.finish(request_id)
        context += [7] * output
    return context


def taught_engine():
    """Two programs in three end after one turn; who makes two makes eight."""
    engine = make_engine()
    for number in range(4):
        run(engine, f"short{number}", 1)
        if number % 2:
            run(engine, f"long{number}", 8)
    return engine


def test_the_controller_learns_who_has_more_before_it():
    engine = taught_engine()
    old = run(engine, "old", 2, end=False)
    engine.arrive("old-2", [*old, 1, 2], program="old")
    engine.arrive("new-0", [5, 6], program="new")
    # 1 + 1/3 * 7 turns are before a newcomer, 6 before one that has made two.
    assert engine.controller.queue.work.turns_left(0) == pytest.approx(10 / 3, rel=0.3)
    assert engine.controller.queue.work.turns_left(2) == pytest.approx(6.0)
    keys = {r: engine.controller.queue.priority(r)[3:] for r in ("old-2", "new-0")}
    assert keys["new-0"] < keys["old-2"]
    engine.check()


def test_a_sub_agent_stands_at_the_level_of_its_parents_work():
    engine = taught_engine()
    run(engine, "parent", 2, end=False)
    parent = engine.controller.programs.get(("", "parent"))
    engine.arrive("sub-0", [5, 6], program="sub", parent_id="parent")
    level = LeastWork().level(engine.controller.queue.work.left_s(parent.work))
    assert engine.controller.queue.priority("sub-0")[3] == level


def test_least_work_takes_the_pins_of_more_work():
    engine = taught_engine()
    run(engine, "old", 2, end=False)
    engine.arrive("new-0", [5, 6], program="new")
    assert engine.controller.memory.reclaim(1, Urgency.WAITING, "new-0") == 1
    engine.abort("new-0")
    # The other way round the order is that of arrival: nobody younger, no pin.
    fcfs = make_engine()
    fcfs.turn("old", [1, 2, 3], program="old")
    fcfs.arrive("new-0", [5, 6], program="new")
    assert fcfs.controller.memory.reclaim(1, Urgency.WAITING, "new-0") == 0


def test_a_long_program_keeps_its_pins_whatever_its_service():
    engine = make_engine()
    context = run(engine, "old", 2, end=False)
    engine.arrive("old-2", [*context, 1], program="old")
    assert engine.admit("old-2")
    engine.clock.advance(1e5)
    assert engine.decode("old-2", [7])
    engine.finish("old-2")
    assert not any(pin.quantum_used for pin in engine.controller.pins)
    assert engine.controller.telemetry.metrics.totals["quanta_used_up", ""] == 0
