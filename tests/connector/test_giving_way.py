"""What a pin is worth to others: regressions from the first outside review."""

from __future__ import annotations

import pytest

from bench.sim.harness import EngineSpec, build_vllm_config
from tests.connector.conftest import HOLD_ALL, free, pinned, totals
from ttlcache.errors import ConfigError
from ttlcache_connector import faults


def keep(engine, program, start, tokens=99, **hints):
    engine.turn(
        f"{program}-1",
        range(start, start + tokens),
        hints={"program_id": program, "tool": "x", **hints},
    )


def test_a_clients_wish_does_not_make_others_wait(make_engine):
    engine = make_engine(
        num_blocks=60,
        extra_config={**HOLD_ALL, "policy_options": {"ttl_s": 0.0}},
    )
    for index in range(8):
        keep(engine, f"wish-{index}", 1000 * index, ttl="300s")
    assert pinned(engine) > 40
    engine.add("run", range(30), max_tokens=50)
    engine.step()
    engine.add("big", range(9000, 9300), max_tokens=4)
    engine.step()
    assert not engine.scheduler.waiting


def test_what_the_policy_stands_by_is_not_a_wish(make_engine):
    engine = make_engine(num_blocks=60, extra_config=HOLD_ALL)
    for index in range(8):
        keep(engine, f"wish-{index}", 1000 * index, ttl="200s")
    engine.add("run", range(30), max_tokens=50)
    engine.step()
    engine.add("big", range(9000, 9300), max_tokens=4)
    engine.step()
    assert len(engine.scheduler.waiting) == 1


def test_an_overdue_request_takes_nothing_if_it_would_not_fit(make_engine, clock):
    engine = make_engine(
        num_blocks=60, extra_config={**HOLD_ALL, "max_queue_wait_s": 5.0}
    )
    keep(engine, "A", 0)
    engine.add("run", range(500, 900), max_tokens=100)
    engine.step()
    engine.add("big", range(9000, 9800), max_tokens=4)
    clock.advance(6.0)
    for _ in range(3):
        engine.step()
    assert pinned(engine) == 6
    engine.run()
    assert "big" in engine.finished


def test_pins_that_cost_no_memory_are_no_victims(make_engine):
    engine = make_engine(num_blocks=60, max_num_seqs=4, extra_config=HOLD_ALL)
    shared = list(range(330))
    for index in range(5):
        engine.turn(
            f"same-{index}",
            shared,
            max_tokens=2,
            hints={"program_id": f"p{index}", "tool": "x"},
        )
    assert pinned(engine) == 20
    engine.add("user", [*shared, 1], max_tokens=4)
    engine.step()
    engine.add("x", range(5000, 5300), max_tokens=400)
    engine.add("y", range(7000, 7200), max_tokens=400)
    for _ in range(2):
        engine.step()
    assert "pins:victim" not in totals(engine)
    engine.run()


def test_what_others_use_is_not_offered_to_who_waits(make_engine):
    engine = make_engine(num_blocks=100, extra_config=HOLD_ALL)
    keep(engine, "old", 9000, tokens=5)
    shared = list(range(330))
    for index in range(5):
        hints = {"program_id": f"p{index}", "tool": "x"}
        engine.turn(f"p{index}", [*shared, *[1000 + index] * 30], hints=hints)
    engine.add("run", [*shared, 1], max_tokens=300)
    engine.step()
    before = pinned(engine)
    # Of 110 pinned blocks, each counted for every pin, ten are nobody else's.
    prompt = range(5000, 5000 + 16 * (free(engine) + 15))
    engine.add("old-2", prompt, hints={"program_id": "old"})
    engine.step()
    assert len(engine.scheduler.waiting) == 1
    assert pinned(engine) == before


def test_a_hybrid_turn_is_pinned_whole_or_not_at_all(make_engine):
    engine = make_engine(
        num_blocks=80,
        sliding_window=48,
        extra_config={**HOLD_ALL, "max_pinned_fraction": 0.25},
    )
    engine.turn("A-1", range(400), hints={"program_id": "A", "tool": "x"})
    assert pinned(engine) == 0
    assert free(engine) == 79


def test_a_shortage_that_is_over_is_forgotten(make_engine):
    engine = make_engine(num_blocks=30, extra_config=HOLD_ALL)
    engine.add("one", range(300), max_tokens=20)
    engine.step()
    engine.add("two", range(1000, 1300), max_tokens=2)
    engine.step()
    ledger = engine.holder
    assert ledger.pressure().wanted_blocks > 0
    engine.run()
    engine.step()
    assert ledger.pressure().wanted_blocks == 0


def test_admission_control_and_client_priorities_are_refused_together():
    with pytest.raises(ConfigError, match="'admission'"):
        build_vllm_config(
            EngineSpec(
                policy="priority",
                extra_config={"admission": "room-to-grow", "ordering": "ttl-aware"},
            )
        )


def test_rare_faults_do_not_add_up(make_engine, clock, monkeypatch):
    from ttlcache.controller import Controller

    monkeypatch.setattr(faults, "MAX_FAULTS", 3)
    engine = make_engine(num_blocks=40, extra_config=HOLD_ALL)
    engine.on_step = None

    def broken(self):
        raise RuntimeError

    monkeypatch.setattr(Controller, "tick", broken)
    for _ in range(10):
        engine.step()
        clock.advance(400.0)
    assert engine.controller.retention_enabled
    for _ in range(3):
        engine.step()
    assert not engine.controller.retention_enabled
