"""Whatever breaks in our hooks, the engine serves on."""

from __future__ import annotations

import inspect
import itertools
from operator import attrgetter
from types import SimpleNamespace

import pytest

from tests.connector.conftest import HOLD_5S, VLLM_OWN, fails, free, totals
from tests.connector.injection import (
    AFTER,
    BEFORE,
    POINTS,
    InjectedError,
    Injector,
    paused,
)
from ttlcache.controller import Controller
from ttlcache.scheduling.ordering import Ordering
from ttlcache_connector import faults
from ttlcache_connector.role import construct, requests, steps
from ttlcache_connector.role.requests import MAX_SLOW_IN_A_ROW, RequestEvents
from ttlcache_connector.role.scheduling import SchedulingCallbacks
from ttlcache_connector.role.status import EngineStatus
from ttlcache_connector.role.steps import CHECK_INVARIANTS, StepEvents
from ttlcache_connector.role.teardown import Teardown


def pin_for_each(engine):
    for program in range(3):
        start = 1000 * program
        hints = {"program_id": str(program)}
        engine.turn(f"{program}", range(start, start + 130), hints=hints)


def serve(engine) -> None:
    """Ten programs of three turns on a pool that does not hold them."""
    contexts = {p: list(range(100 * p, 100 * p + 80)) for p in range(10)}
    for turn in range(3):
        for program, context in contexts.items():
            engine.add(
                f"{program}-{turn}",
                [*context, turn],
                max_tokens=10,
                hints={"program_id": str(program), "is_last_step": turn == 2},
            )
        engine.run(max_steps=3000)
        for program in contexts:
            done = engine.finished[f"{program}-{turn}"]
            contexts[program] = list(done.all_token_ids)


@pytest.fixture(autouse=True)
def hooks_are_not_given_up(monkeypatch):
    monkeypatch.setattr(faults, "MAX_FAULTS", 1_000_000)


BUSY = {**HOLD_5S, "max_pinned_fraction": 1.0, "max_queue_wait_s": 2.0}


@pytest.mark.parametrize(("every", "async_scheduling"), [(1, False), (3, True)])
@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("point", POINTS)
def test_every_hook_may_throw(make_engine, clock, point, when, every, async_scheduling):
    if (point, every) == ("release", 1):
        every = 2  # a pool that never takes a block back serves nobody
    extra = {**BUSY, "ordering": "ttl-aware"}
    engine = make_engine(
        num_blocks=30,
        max_num_seqs=3,
        async_scheduling=async_scheduling,
        extra_config=extra,
    )
    role = engine.role
    injector = Injector(every, when=(when,))
    injector.install(role, point)

    def after_step() -> None:
        clock.advance(0.1)
        role.status.take_stats()
        if point == "release_all" and clock.now_s() % 3.0 < 0.1:
            engine.scheduler.reset_prefix_cache()

    engine.on_step = after_step
    serve(engine)
    assert len(engine.finished) == 30
    assert injector.thrown[point] > 0, f"{injector.called[point]} calls"
    counted = {
        key.split(":")[1]: number
        for key, number in totals(engine).items()
        if key.startswith("hook_errors:")
    }
    assert sum(counted.values()) == role.parts.faults.total == injector.thrown[point]
    assert set(counted) <= POINTS[point][2]
    # Nothing stays behind, though every table may have been interrupted.
    with paused(injector):
        engine.scheduler.reset_prefix_cache()
    assert free(engine) == 29
    assert role.parts.holder.references() == {}


def test_the_table_names_every_hook():
    """Whoever adds a guarded hook adds its injection, or says why not here."""
    parts = (RequestEvents, StepEvents, SchedulingCallbacks, Teardown, EngineStatus)
    guarded = {
        name
        for part in parts
        for name, method in inspect.getmembers(part)
        if hasattr(method, "__wrapped__")
    }
    # See the tests below, and test_demotion.
    unreachable = {"before_foreign_step", "shutdown"}
    unreachable |= {"on_scheduled", "apply_tier_events", *AT_WILL}
    # They end what has failed before, see test_faults_of_any_hook_turn_retention_off.
    unreachable |= {"release_if_off", "drop_rest"}
    counted = frozenset().union(*(labels for _, _, labels in POINTS.values()))
    assert guarded - unreachable <= counted


#: Hooks that no step of an engine without a lower tier calls -> of whom, and what they
#: rest on.
AT_WILL = {
    "on_tier_lookup": ("requests", "controller.tier_knowledge", "on_lookup"),
    "is_loaded_by_another": ("requests", "holder.pool", "hash_block_size"),
    "control": ("status", "controller", "tick"),
    "lookup_limit_tokens": ("requests", "controller", "requests"),
    "on_worker_output": ("steps", "lower", "call"),
    "read_tool": ("requests", "controller", "tick"),  # such a request has no output
    "on_paused": ("steps", "controller", "on_paused"),
    "retained_share": ("scheduling", "engine", "queue_counts"),
    "queued_s": ("scheduling", "controller", "requests"),
}


class Odd(Ordering):
    def key(self, turn):
        return [(), ("first",), None, (float("nan"),)][turn.request_seq % 4]


def test_an_ordering_may_answer_nonsense(make_engine):
    extra = {**BUSY, "ordering": f"{__name__}:Odd"}
    engine = make_engine(num_blocks=30, extra_config=extra)
    engine.on_step = None  # faults are what this is about
    serve(engine)
    assert len(engine.finished) == 30
    assert totals(engine)["hook_errors:priority"] > 0


@pytest.mark.parametrize("hook", AT_WILL)
def test_hooks_outside_of_steps_may_throw(make_engine, monkeypatch, hook):
    engine = make_engine(num_blocks=40)
    engine.turn("A-1", range(100))
    engine.on_step = None  # a fault is what this is about
    role = engine.role
    of_whom, owner, name = AT_WILL[hook]
    with monkeypatch.context() as patch:
        target = attrgetter(owner)(role.parts)
        has_slots = not hasattr(target, "__dict__")
        patch.setattr(type(target) if has_slots else target, name, fails)
        request = SimpleNamespace(
            request_id="A-2", skip_reading_prefix_cache=False, finished_recving=()
        )
        args = {"retained_share": (), "is_loaded_by_another": (request, 0)}
        getattr(getattr(role, of_whom), hook)(*args.get(hook, (request,)))
    role.status.take_stats()
    assert totals(engine)[f"hook_errors:{hook}"] == 1
    assert len(engine.turn("A-2", range(100))) > 100


@pytest.mark.parametrize("hook", ["on_scheduled", "before_foreign_step"])
def test_steps_that_cannot_be_read_or_logged_are_served(make_engine, monkeypatch, hook):
    """Under our scheduler and a foreign one."""
    is_ours = hook == "on_scheduled"
    scheduler_cls = None if is_ours else VLLM_OWN
    engine = make_engine(num_blocks=40, scheduler_cls=scheduler_cls)
    engine.on_step = None
    broken = (steps, "step_of") if is_ours else (engine.role.status, "log_start")
    monkeypatch.setattr(*broken, fails)
    engine.turn("A-1", range(100), hints={"program_id": "A"})
    assert "A-1" in engine.finished
    assert totals(engine)[f"hook_errors:{hook}"] > 0


def test_a_broken_shutdown_still_frees_every_block(make_engine):
    engine = make_engine(num_blocks=40)
    engine.turn("A-1", range(100), hints={"program_id": "A"})
    assert free(engine) < 39
    Injector(1).install(engine.role, "release_all")
    engine.scheduler.shutdown()
    assert free(engine) == 39


def test_blocks_that_a_fault_left_behind_are_a_gauge_and_are_freed(make_engine, clock):
    engine = make_engine(num_blocks=31)
    engine.on_step = None
    role = engine.role

    def leaked_blocks() -> int:
        clock.advance(1.0)
        return role.status.take_stats().data["gauges"]["leaked_blocks"]

    engine.turn("A-1", range(130), hints={"program_id": "A"})
    held = 30 - free(engine)
    assert leaked_blocks() == 0
    injector = Injector(1)
    injector.install(role, "release")
    with pytest.raises(InjectedError):
        role.parts.controller.end_program("", "A")
    assert free(engine) == 30 - held
    with paused(injector):
        assert leaked_blocks() == held > 0
        assert free(engine) == 30
        assert leaked_blocks() == 0
        # A reference in no table is seen when the engine rests.
        engine.pool.touch(engine.pool.blocks[5:8])
        assert leaked_blocks() == 3


@pytest.mark.parametrize("fault", ["reclaim", "release"])
def test_pins_that_cannot_be_taken_do_not_wedge(make_engine, fault):
    """The call that takes them always throws, or the table has forgotten them."""
    forever = {"policy_options": {"ttl_s": 1e6}, "max_ttl_s": 1e6}
    engine = make_engine(num_blocks=31, extra_config={**BUSY, **forever})
    engine.on_step = None
    pin_for_each(engine)
    controller = engine.role.parts.controller
    injector = Injector(1)
    injector.install(engine.role, fault)
    if fault == "release":
        for program in range(3):
            with pytest.raises(InjectedError):
                controller.end_program("", str(program))
        assert len(controller.pins) == 0
        injector.is_on = False
    assert free(engine) < 10
    engine.add("Z", range(9000, 9400), max_tokens=20)
    engine.run(max_steps=100)
    assert "Z" in engine.finished


@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("also", ["release_all", "release", "rekey"])
@pytest.mark.parametrize(
    "point", ["on_arrival", "hold", "tick", "drain", "note_local_hit", "may_start"]
)
def test_faults_of_any_hook_turn_retention_off(
    make_engine, clock, monkeypatch, point, when, also
):
    """Turning off fails, too: it is tried again until nothing is held."""
    monkeypatch.setattr(faults, "MAX_FAULTS", 5)
    engine = make_engine(num_blocks=30, extra_config=BUSY)
    role = engine.role
    first = Injector(1, when=(when,))
    first.install(role, point)
    second = Injector(2 if also == "release" else 1, when=(when,))
    second.install(role, also)
    held_for = 0

    def after_step() -> None:
        nonlocal held_for
        clock.advance(0.1)
        role.status.take_stats()
        is_held = (
            not role.parts.controller.retention_enabled
            and role.parts.holder.references()
        )
        held_for = held_for + 1 if is_held else 0
        assert held_for <= 2, "steps after retention was turned off"

    engine.on_step = after_step
    serve(engine)
    assert not role.parts.controller.retention_enabled
    assert free(engine) == 29


def test_a_role_that_breaks_serves_as_plain_vllm(make_engine, monkeypatch, our_log):
    monkeypatch.setattr(construct, "groups_of", fails)
    engine = make_engine(num_blocks=40)
    engine.on_step = None
    serve(engine)
    assert engine.connector.scheduler_role is None
    assert len(engine.finished) == 30
    assert free(engine) == 39
    assert engine.scheduler.reset_prefix_cache()
    assert engine.connector.control({"do": "programs"}) == {}
    assert engine.connector.get_kv_connector_stats() is None
    engine.scheduler.shutdown()
    assert sum("no retention in this server" in line for line in our_log) == 1


def test_enough_faults_turn_retention_off(make_engine, clock, monkeypatch, our_log):
    monkeypatch.setattr(faults, "MAX_FAULTS", 3)
    engine = make_engine(num_blocks=40, extra_config=HOLD_5S)
    engine.on_step = None
    with monkeypatch.context() as patch:
        patch.setattr(Controller, "tick", fails)
        for _ in range(10):
            engine.step()
            clock.advance(400.0)
    clock.advance(400.0)
    assert engine.controller.retention_enabled, "rare faults do not add up"
    engine.turn("A-1", range(100), hints={"program_id": "A"})
    assert free(engine) < 39
    with monkeypatch.context() as patch:
        patch.setattr(Controller, "tick", fails)
        for _ in range(5):
            engine.step()
    assert free(engine) == 39
    assert not engine.controller.retention_enabled
    engine.turn("B-1", range(100), hints={"program_id": "B"})
    assert free(engine) == 39
    assert sum("hook before_step failed" in m for m in our_log) == 1
    assert sum("this part of it is now off" in m for m in our_log) == 1


def test_a_slow_policy_is_not_asked_for_long(make_engine, monkeypatch, our_log):
    stopwatch = itertools.count()  # every look at it is a second later
    monkeypatch.setattr(requests, "stopwatch_s", lambda: float(next(stopwatch)))
    engine = make_engine(num_blocks=60)
    engine.on_step = None
    for program in range(5):
        engine.turn(f"{program}", range(1000 * program, 1000 * program + 60))
        enabled = engine.controller.retention_enabled
        assert enabled == (program < MAX_SLOW_IN_A_ROW - 1)
    assert free(engine) == 59
    assert totals(engine)["hook_errors:slow"] == 1
    assert sum("retention is off" in line for line in our_log) == 1


def test_one_slow_decision_now_and_then_is_forgiven(make_engine):
    role = make_engine(num_blocks=40).connector.scheduler_role
    for took_s in 20 * [10.0, 10.0, 0.001]:
        role.requests._watch_slow_turns(took_s)
    assert role.parts.controller.retention_enabled


def test_bad_hints_cost_retention_only(make_engine):
    junk = {"ttl": {"a": [1]}}  # each of them: tests/core/test_hints.py
    engine = make_engine(num_blocks=40)
    engine.turn("A-1", range(100), hints=junk)
    assert "A-1" in engine.finished
    assert free(engine) == 39
    assert sum(n for k, n in totals(engine).items() if k.startswith("hints_rej")) == 1


def test_checked_invariants_name_what_is_broken(make_engine, our_log, monkeypatch):
    monkeypatch.setenv(CHECK_INVARIANTS, "1")
    engine = make_engine(num_blocks=40)
    engine.on_step = None
    engine.turn("A-1", range(100), hints={"program_id": "A"})
    engine.step()
    assert "hook_errors:invariants" not in totals(engine)
    (pin,) = engine.controller.pins
    engine.pool.touch([engine.holder.blocks_by_pin[pin.pin_id][0]])
    engine.step()
    assert totals(engine)["hook_errors:invariants"] == 1
    assert any("has 2 references, expected 1" in line for line in our_log)
