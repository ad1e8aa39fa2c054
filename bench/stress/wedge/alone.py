"""What vLLM does by itself: the same schedules with nothing of ours in the engine.

`bench wedge` leaves out what no pin can be blamed for. This shows what that is: loads
into caches of several groups, on vLLM's own scheduler, by a connector that only loads.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from bench.stress.wedge import loading
from bench.stress.wedge.engine import DrivenEngine
from bench.stress.wedge.loading import Loads
from bench.stress.wedge.schedule import Schedule
from bench.stress.wedge.spec import RandomEngine, plain_scheduler, random_engine

#: In place of our role: no pins, no programs, no faults.
_NOBODY = SimpleNamespace(
    parts=SimpleNamespace(
        controller=SimpleNamespace(
            pins=(), requests=(), programs=(), end_program=lambda *_names: None
        )
    )
)


class AloneEngine(DrivenEngine):
    """Without tables of ours there is nothing to check but that it goes on."""

    @property
    def role(self) -> Any:
        return _NOBODY

    def check(self) -> None:
        """No tables of ours."""


class AloneSchedule(Schedule):
    """Hybrid caches with loads, on vLLM's own scheduler."""

    driver = AloneEngine

    def draw(self) -> RandomEngine:
        return hybrid_engine(self.rng)


def hybrid_engine(rng: random.Random) -> RandomEngine:
    """An engine whose cache has several groups and that loads KV from elsewhere."""
    loading.register()
    drawn = random_engine(rng, load_share=0.0)
    while drawn.engine.sliding_window is None and drawn.engine.mamba_mode is None:
        drawn = random_engine(rng, load_share=0.0)
    engine = replace(
        drawn.engine,
        kv_connector=loading.BESIDE,
        scheduler_cls=plain_scheduler(drawn.engine.async_scheduling),
        extra_config={},
    )
    loads = Loads(
        share=rng.choice((0.3, 0.6, 0.9)),
        failing=0.0,
        pace=rng.choice((0.05, 0.3, 1.0)),
        beside=True,
    )
    return replace(drawn, engine=engine, loads=loads, max_programs=None)
