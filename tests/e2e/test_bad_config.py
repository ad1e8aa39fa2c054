"""A server with a misspelt key does not start, and says which key."""

from __future__ import annotations

import pytest

from bench.serve.process import ServerError
from tests.e2e.conftest import start_server

pytestmark = pytest.mark.e2e


def test_bad_key_stops_the_server_naming_the_nearest_valid_one(tiny_model, tmp_path):
    with (
        pytest.raises(ServerError) as caught,
        start_server(tiny_model, tmp_path / "log", {"polcy": "x"}),
    ):
        pass
    assert "'polcy'" in str(caught.value)
    assert "did you mean 'policy'" in str(caught.value)
    assert "exit status 1" in str(caught.value)
