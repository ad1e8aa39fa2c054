"""Arm `autellix`: attained service of programs on vLLM's real scheduler."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from bench.sim.rivals.arms import ARMS
from bench.sim.rivals.plas import Attained, PlasGate, level_of
from ttlcache.clock import VirtualClock, use_clock
from ttlcache_sim.harness import EngineHarness, EngineSpec


@pytest.mark.parametrize("level", range(16))
def test_service_ranges_double(level):
    """From less than a second up; the last queue takes all the rest."""
    least_s, below_s = (2.0 ** (level - 1) if level else 0.0), 2.0**level
    assert level_of(least_s) == level
    assert level_of(below_s - 0.1 if level < 15 else 1e9) == level


class Rig:
    """An engine with one seat whose queue a `PlasGate` orders."""

    def __init__(self, clock, **spec):
        extra = ARMS["autellix"].extra_config(1.0)
        spec = {"num_blocks": 200, "max_num_seqs": 1, **spec}
        self.engine = EngineHarness(EngineSpec(extra_config=extra, **spec))
        self.gate = PlasGate(self.engine.connector)
        self.clock = clock

    def start(self, program, *, turn=1, max_tokens=10):
        first = 1000 * ord(program)
        return self.engine.add(
            f"{program}-{turn}",
            range(first, first + 40),
            max_tokens=max_tokens,
            hints={"program_id": program},
        )

    def finish(self, program, *, is_last=False):
        agent = SimpleNamespace(program_id=program, is_last=is_last)
        assert self.gate.finish(agent, self.clock.now_s()) == []

    def serve(self, program, runs_s, *, waits_s=0.0, turn=1):
        """One call of a program that waits, then runs."""
        self.start(program, turn=turn)
        self.clock.advance(waits_s)
        self.engine.step()
        self.clock.advance(runs_s)
        self.engine.run()
        self.finish(program)

    def take_the_seat(self):
        """A long call of program R."""
        self.start("R", max_tokens=30)
        self.engine.step()

    def order(self):
        """Request ids in the order in which they are scheduled."""
        order = []
        while self.engine.scheduler.has_unfinished_requests():
            output = self.engine.step()
            order += [new.req_id for new in output.scheduled_new_reqs]
        return order


@pytest.fixture
def clock():
    with use_clock(VirtualClock(100.0)) as virtual:
        yield virtual


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def rig(request, clock):
    return Rig(clock, async_scheduling=request.param)


def test_the_least_served_program_goes_first(rig):
    rig.serve("A", 5.0)
    rig.serve("B", 1.2)
    rig.serve("C", 0.5)
    rig.take_the_seat()
    for program in "ABC":
        rig.start(program, turn=2)
    rig.start("N")  # new, as good as C: both below one second
    assert rig.order() == ["C-2", "N-1", "B-2", "A-2"]


def test_service_adds_up_over_calls(rig):
    for turn in (1, 2, 3):
        rig.serve("A", 1.5, waits_s=turn, turn=turn)
    rig.serve("B", 2.5)
    assert rig.gate.attained("A") == Attained(service_s=4.5, wait_s=6.0)
    rig.take_the_seat()
    rig.start("A", turn=4)
    rig.start("B", turn=2)
    assert rig.order() == ["B-2", "A-4"]


def test_a_starved_call_is_promoted_and_its_programs_counters_start_anew(rig):
    # Scenario:
    #   1. A waited for 3 s and was served for 2 s.
    #   2. Its next call waits behind R, and behind N, which is new.
    #   3. After 4 * 2 - 3 = 5 s it is promoted: before N, and both counters are zero.
    #   4. Of its wait only what comes after the promotion counts.
    rig.serve("A", 2.0, waits_s=3.0)
    rig.take_the_seat()
    rig.start("A", turn=2)
    rig.start("N")
    due_s = rig.clock.now_s() + 5.0
    assert rig.gate.next_tick_s() == due_s
    waiting = rig.engine.scheduler.waiting
    rig.clock.set(due_s - 0.1)
    assert waiting.peek_request().request_id == "N-1"
    rig.clock.set(due_s)
    assert waiting.peek_request().request_id == "A-2"
    assert rig.gate.next_tick_s() is None
    assert rig.gate.attained("A") == Attained()
    rig.clock.advance(1.0)
    assert rig.order() == ["A-2", "N-1"]
    rig.clock.advance(2.0)
    rig.finish("A")
    assert rig.gate.attained("A") == Attained(service_s=2.0, wait_s=1.0)
