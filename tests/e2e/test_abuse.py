"""Hundreds of sessions of one greedy client over HTTP, and a tenant beside it.

tests/connector/test_abuse.py has 10,000 of them on vLLM's scheduler without a server.
"""

from __future__ import annotations

import pytest

from bench.stress.abuse.cli import MAX_HIT_LOSS
from bench.stress.abuse.http import abuse

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    "sessions", [150, pytest.param(1000, marks=pytest.mark.nightly)]
)
def test_greedy_sessions_cost_others_little(agent, sessions):
    agent.http.post("/reset_prefix_cache").raise_for_status()
    found = abuse(agent.server, sessions)
    agent.http.post("/reset_prefix_cache").raise_for_status()
    assert found.refused == 0
    assert found.after.programs > sessions / 5, "the sessions were not seen as programs"
    assert found.after.metrics_lines == found.before.metrics_lines
    assert found.after.metrics_bytes < found.before.metrics_bytes + 1000
    assert found.after.hook_errors == found.before.hook_errors
    assert found.after.retention_enabled == 1
    assert found.hit_calm > 0.5
    assert found.hit_flooded >= found.hit_calm - MAX_HIT_LOSS
