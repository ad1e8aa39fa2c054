"""Programs as they are expected to finish: trust, pins, sub-agents."""

import pytest

from tests.fake_engine import FakeEngine
from ttlcache.programs.model import Work
from ttlcache.scheduling.remaining_work import DELAY, MAX_EXCESS_PROGRAMS
from ttlcache.types import Urgency


def make_engine(pool_blocks=400):
    config = {
        "policy": "fixed",
        "policy_options": {"ttl_s": 1000.0},
        "max_ttl_s": 1000.0,
        "max_pinned_fraction": 1.0,
        "ordering": "expected-finish",
    }
    return FakeEngine(config, pool_blocks=pool_blocks, block_tokens=1)


def turns(engine, program, count, output=4, end=True, **hints):
    """A program turn by turn, each of 3 new tokens; yields the context so far."""
    context = []
    for index in range(count):
        if end and index == count - 1:
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
        yield list(context)


def run(engine, program, count, **hints):
    return list(turns(engine, program, count, **hints))[-1]


def taught_engine():
    """Eight programs in nine end after one turn; one that makes two makes eight.

    The short ones come between the turns of the long ones.
    """
    engine = make_engine()
    for number in range(12):
        for turn, _ in enumerate(turns(engine, f"{chr(97 + number)}long", 8)):
            run(engine, f"{chr(65 + number)}short{turn}", 1)
    return engine


def delay(engine, request_id):
    return engine.controller.requests[request_id].work_delay_places


def test_who_has_more_before_it_is_put_back_further():
    engine = taught_engine()
    work = engine.controller.queue.work
    old = run(engine, "1old", 2, end=False)
    engine.arrive("old-2", [*old, 1, 2], program="1old")
    engine.arrive("new-0", [5, 6], program="2new")
    assert work.turns_left(2) == pytest.approx(6.0)
    assert work.turns_left(0) < 5.0
    assert 0.2 < work.trust <= 1.0  # two turns made foretell six
    assert delay(engine, "old-2") > delay(engine, "new-0") >= 0
    engine.check()


def test_where_programs_are_alike_the_order_is_that_of_arrival():
    engine = make_engine()
    for number in range(12):
        run(engine, f"{chr(97 + number)}alike", 4)
    old = run(engine, "1old", 2, end=False)
    engine.arrive("old-2", [*old, 1, 2], program="1old")
    engine.arrive("new-0", [5, 6], program="2new")
    first = min("old-2", "new-0", key=engine.controller.queue.priority)
    assert first == "old-2"
    assert delay(engine, "old-2") == delay(engine, "new-0") == 0


def test_where_no_new_programs_come_none_is_put_back():
    engine = taught_engine()
    old = run(engine, "1old", 2, end=False)
    engine.arrive("old-2", [*old, 1, 2], program="1old")
    assert delay(engine, "old-2") > 0
    engine.abort("old-2")
    engine.clock.advance(300.0)
    engine.arrive("old-3", [*old, 1, 2], program="1old")
    assert delay(engine, "old-3") == 0


def test_a_program_is_put_back_by_so_many_places_at_most():
    work = taught_engine().controller.queue.work
    endless = Work(turns=4000, prompt_s=1e9, output_s=1e9)
    places = 8  # short programs that come while a long one runs
    delay = work.work_delay_places(endless, places)
    assert 0 < delay <= DELAY * places * MAX_EXCESS_PROGRAMS


def test_a_sub_agent_stands_where_its_parents_work_puts_it():
    engine = taught_engine()
    run(engine, "1parent", 2, end=False)
    parent = engine.controller.programs.get(("", "1parent"))
    engine.arrive("sub-0", [5, 6], program="2sub", parent_id="1parent")
    queue = engine.controller.queue
    recent = queue.programs.place_numbers.recent("")
    assert delay(engine, "sub-0") == queue.work.work_delay_places(parent.work, recent)


def test_what_another_tenant_begins_puts_no_program_back():
    engine = taught_engine()
    old = run(engine, "1old", 2, end=False)
    for number in range(400):
        engine.arrive(f"flood-{number}", [5, 6], program=f"f{number}", tenant="other")
    engine.arrive("old-2", [*old, 1, 2], program="1old")
    assert 0 < delay(engine, "old-2") < 100


def test_a_newcomer_takes_the_pin_of_more_work():
    engine = taught_engine()
    run(engine, "1old", 2, end=False)
    engine.arrive("new-0", [5, 6], program="2new")
    assert engine.controller.memory.reclaim(1, Urgency.WAITING, "new-0") == 1
    engine.abort("new-0")
    # Where nothing is known the order is that of arrival: nobody younger, no pin.
    fcfs = make_engine()
    fcfs.turn("old", [1, 2, 3], program="old")
    fcfs.arrive("new-0", [5, 6], program="new")
    assert fcfs.controller.memory.reclaim(1, Urgency.WAITING, "new-0") == 0
