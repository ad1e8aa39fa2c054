"""`ttlcache top` against what servers answer, and how it says what is wrong."""

import json
from functools import partial

import httpx
import pytest

from tests.commands import output_of
from ttlcache.cli.main import app

ROW = {"program": "p-1", "turns": 3, "running": 0, "tool": "bash", "gap_s": 1.5}
ROW |= {"waiting": 0, "pins": 1, "pinned_blocks": 40, "ttl_left_s": 9.0}
ENGINES = {"engines": [{"programs": [ROW]}, {"gauges": {"pool_blocks": 80}}]}
top = partial(output_of, app, "top", "--url", "http://server")


@pytest.fixture
def answer(monkeypatch):
    """Of a server, whatever it is asked: status and text, or an error of httpx."""
    asked = []

    def answer(status=200, text="", error=None):
        def handle(_, request):
            asked.append(request)
            if error is not None:
                raise error
            return httpx.Response(status, text=text, request=request)

        monkeypatch.setattr(httpx.HTTPTransport, "handle_request", handle)
        return asked

    return answer


def test_programs_of_all_engines_are_shown_once(answer):
    asked = answer(text=json.dumps(ENGINES))
    shown = top("--once", "--api-key", "secret")
    assert ("p-1" in shown, "engine 1: 0 programs" in shown) == (True, True)
    assert [request.headers["authorization"] for request in asked] == ["Bearer secret"]


def test_it_looks_again_until_it_is_interrupted(monkeypatch):
    asked = []

    def handle(_, request):
        asked.append(request)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return httpx.Response(200, json=ENGINES, request=request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", handle)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # to rich, a terminal
    top("--interval", "0.1")
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"status": 404}, "does not run ttlcache"),
        ({"status": 401}, "asks for its key: --api-key"),
        ({"status": 500, "text": "oh"}, "status 500 oh"),
        ({"text": "<html>"}, "the whole answer is not what it should be"),
        ({"text": '{"engines": [{"gauges": 3}]}'}, "engines.0.gauges is not"),
        ({"error": httpx.ConnectError("[SSL] no")}, "not by TLS that is trusted"),
        ({"error": httpx.ConnectError("Errno 111")}, "no server answers"),
        ({"error": httpx.ReadTimeout("late")}, "no answer in time"),
    ],
)
def test_why_nothing_is_shown_is_said_in_a_sentence(answer, found, told):
    answer(**found)
    assert told in " ".join(top("--once", status=1).split())
