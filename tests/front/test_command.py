"""`ttlcache front`: what it refuses, and what it starts."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.commands import output_of
from tests.front.conftest import HANG_S, front_before
from ttlcache.cli.main import app

pytestmark = pytest.mark.timeout(HANG_S)

WRONG = [
    "",
    "router:30000",
    "127.0.0.1:8000",
    "htp://x",
    "http://",
    "http://:8000",
    "http://[",
    "http://x:abc",
    "http://x:99999",
    "http://x y",
    "http://x\n/",
    "http://x?a=1",
    "http://user:password@x",
]


@pytest.mark.parametrize("value", WRONG)
def test_urls_that_cannot_be_asked_are_refused_at_start(value, monkeypatch):
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: pytest.fail("it starts"))
    printed = output_of(app, "front", "--upstream", value, status=2)
    for part in ("--upstream", repr(value), "expected", "http://127.0.0.1:8000"):
        assert part in printed


@pytest.mark.parametrize(
    "value",
    ["http://x", "https://x/base/", "http://[::1]:80", "http://a_b:1", "HTTP://X"],
)
def test_others_are_taken(value):
    front_before(url=value)


def test_idle_connections_stay_as_long_as_told(monkeypatch):
    """A load balancer that keeps them longer sends a turn into a closed one."""
    told: dict[str, Any] = {}
    monkeypatch.setattr("uvicorn.run", lambda _, **options: told.update(options))
    words = ("front", "--upstream", "http://x", "--keep-alive-s", "75")
    assert "http://127.0.0.1:8080 before http://x" in output_of(app, *words)
    assert told["timeout_keep_alive"] == 75


def test_without_its_extra_the_front_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    printed = output_of(app, "front", "--upstream", "http://x", status=1)
    assert "pip install 'ttlcache[fleet]'" in printed
