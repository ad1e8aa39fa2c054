"""MORI's pins, on the core alone."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from bench.sim.rivals.arms import ARMS
from bench.sim.rivals.mori import unpin
from ttlcache.testing import FakeEngine


def test_the_pins_of_a_program_that_goes_down_end_at_the_next_step():
    extra = ARMS["mori"].extra_config(1.0)
    engine = FakeEngine(extra, pool_blocks=64, block_tokens=4)
    for program, first in (("A", 0), ("B", 100)):
        engine.turn(f"{program}/1", [*range(first, first + 10)], program=program)
    engine.step(seconds=100.0)  # members stay
    pins = engine.controller.pins
    assert {pin.program.program_id for pin in pins} == {"A", "B"}

    unpin(pins, "A", engine.clock.now_s())
    engine.step(seconds=0.1)
    assert {pin.program.program_id for pin in pins} == {"B"}
