"""Stories of programs, told to a controller by a fake engine of 4-token blocks."""

from __future__ import annotations

from ttlcache.testing import FakeEngine

TTL_S = 10.0
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # two full blocks and a half


def make_engine(pool_blocks=64, **config):
    settings = {"policy": "fixed", "policy_options": {"ttl_s": TTL_S}, **config}
    return FakeEngine(settings, pool_blocks=pool_blocks, block_tokens=4)


def outcomes(engine):
    """How many pins ended how."""
    totals = engine.controller.telemetry.metrics.totals
    return {label: n for (name, label), n in totals.items() if name == "pins"}


def total(engine, name, label=""):
    return engine.controller.telemetry.metrics.totals[name, label]


def pins(engine):
    return list(engine.controller.pins)
