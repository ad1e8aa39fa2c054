"""What a client nested too deep never reaches vLLM's workers, whatever way it came."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from tests.connector.conftest import nested, pinned, totals
from ttlcache.programs.client_values import MAX_DEPTH, MAX_NESTED_SIZE


@pytest.mark.parametrize(
    ("reason", "value"),
    [
        ("nested_too_deep", nested(500)),
        ("nested_too_deep", nested(5000)),
        ("nested_too_large", "x" * MAX_NESTED_SIZE),
    ],
)
def test_a_step_with_it_can_be_pickled(make_engine, reason, value):
    engine = make_engine()
    params = {"ttlcache": {"program_id": "p"}, "x": value}
    request = engine.add("r", range(64), kv_transfer_params=params)
    assert request.kv_transfer_params is None
    output = engine.step()
    assert len(pickle.dumps(output.scheduled_new_reqs)) < 10_000
    assert totals(engine)[f"hints_rejected:{reason}"] == 1


def test_what_fits_stays(make_engine):
    engine = make_engine()
    params = {
        "ttlcache": {"program_id": "p", "ttl": 60},
        "x": nested(MAX_DEPTH),
        "ids": list(range(100_000)),
    }
    request = engine.add("r", range(64), kv_transfer_params=params)
    assert request.kv_transfer_params == params
    pickle.dumps(engine.step().scheduled_new_reqs)
    engine.run()
    assert pinned(engine) > 0


def test_other_arguments_stay_and_retention_off_guards_as_well(make_engine):
    engine = make_engine()
    engine.connector.scheduler_role = None
    deep = {"x": nested(500)}
    params = SimpleNamespace(extra_args={"kv_transfer_params": deep, "top_a": 1})
    request = SimpleNamespace(sampling_params=params, kv_transfer_params=deep)
    engine.connector.on_new_request(request)
    assert params.extra_args == {"top_a": 1}
    assert request.kv_transfer_params is None
