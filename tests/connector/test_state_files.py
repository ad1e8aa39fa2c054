"""What a profile file tells."""

from __future__ import annotations

import json

import pytest

from tests.connector.conftest import HOLD_5S
from ttlcache.errors import ConfigError
from ttlcache_connector.cli.sweep import fit


@pytest.fixture
def start(make_engine, tmp_path):
    """An engine with a profile of this content; None: there is no file."""

    def start(content: str | None):
        path = tmp_path / "profile.json"
        if content is not None:
            path.write_text(content)
        extra = {**HOLD_5S, "profile_path": str(path)}
        return make_engine(num_blocks=40, extra_config=extra)

    return start


def test_a_profile_seeds_the_costs(start):
    prefill = fit([(1000, 0.1), (2000, 0.2)])
    costs = start(json.dumps({"prefill": list(prefill)})).controller.costs
    assert costs.prefill_s(1500) == pytest.approx(0.15, rel=0.05)


@pytest.mark.parametrize("content", [None, "no json", "[]", '{"prefill": "x"}'])
def test_a_wrong_profile_stops_the_server(start, content):
    with pytest.raises(ConfigError, match="prof"):
        start(content)
