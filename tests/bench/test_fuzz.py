"""The fuzz asks for everything that ttlcache documents, and judges as it says."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import unquote

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from bench.stress.fuzz.play import Answer, is_same, read_answer
from bench.stress.fuzz.requests import COMPLETIONS, HEADERS, HINTS, FuzzRequest, make
from tests.documented import HEADER_NAMES
from ttlcache.programs.hints import _PARSERS
from ttlcache_connector.http import middleware
from ttlcache_connector.http.asgi import GENERATING
from ttlcache_connector.http.body import _TELLING
from ttlcache_connector.http.middleware import ProgramIdMiddleware

REQUESTS = [make(number) for number in range(1500)]


def test_it_asks_for_everything_that_is_documented():
    assert {r.plain_path for r in REQUESTS} == {*GENERATING, None}
    names = {name.lower() for r in REQUESTS for name, _ in r.headers}
    assert names >= {*HEADER_NAMES, b"x-data-parallel-rank"}
    assert {name.lower() for name in HEADERS} <= names
    assert set(HINTS) >= set(_PARSERS)
    bodies = b"\n".join(r.body for r in REQUESTS)
    fields = (*_TELLING, *HINTS, "agentic_context")
    for name in (*fields, *(f"ttlcache_{hint}" for hint in HINTS)):
        assert f'"{name}":'.encode() in bodies, name
    for odd in (b"[" * 10_000, b"x" * 1_000_000, rb"\ud800", b"NaN", b"18446744073709"):
        assert odd in bodies
    paths = {r.path.partition("/programs/")[2].rpartition("/")[2] for r in REQUESTS}
    assert {"end", "progress"} <= paths
    assert any(r.path == "/ttlcache/programs" for r in REQUESTS)
    assert sum(r.path.startswith("/sessions/") for r in REQUESTS) > 50


def test_a_number_is_always_the_same_request():
    assert [make(number) for number in range(50)] == REQUESTS[:50]
    assert make(0, seed=1) != REQUESTS[0]


@pytest.mark.parametrize(
    ("plain", "ours", "same"),
    [
        (Answer(200, "1,2"), Answer(200, "1,2"), True),
        (Answer(200, "1,2"), Answer(200, "1,3"), False),
        (Answer(200, "1,2"), Answer(400, ""), False),
        (Answer(400, ""), Answer(200, "1"), False),
        (Answer(400, ""), Answer(500, ""), False),
        (Answer(500, ""), Answer(200, "1"), True),
        (Answer(500, ""), Answer(0, ""), False),
        (None, Answer(200, "1"), True),
        (None, Answer(0, ""), False),
    ],
)
def test_the_same_where_plain_vllm_answers(plain, ours, same):
    request = FuzzRequest(0, "POST", COMPLETIONS, COMPLETIONS, (), b"")
    assert is_same(request, plain, ours) is same


def test_a_control_route_never_fails():
    request = FuzzRequest(0, "POST", "/ttlcache/programs/p/end", None, (), b"")
    assert is_same(request, None, Answer(404, ""))
    assert not is_same(request, None, Answer(503, ""))


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (b'{"token_ids":[1, 2],"text":"a"}', Answer(200, "1,2")),
        (b'data: {"token_ids":[1]}\n\ndata: {"token_ids":[2]}', Answer(200, "1,2")),
        (b'data: {"token_ids":[]}\n\ndata: {"token_ids":[2]}', Answer(200, "2")),
        (b'{"id": "r", "content":[{"text": "a\\"b"}]}', Answer(200, '"a\\"b"')),
        (b'data: {"error":{"message":"x","code":500}}\n\n', Answer(500, "")),
    ],
)
def test_what_was_generated_is_read_from_answers_and_streams(content, answer):
    assert read_answer(200, content) == answer
    assert read_answer(400, content) == Answer(400, "")


#: What the middleware may change in a body.
OURS = ("kv_transfer_params", "vllm_xargs", "session_id")


def test_the_middleware_never_fails_and_changes_nothing_else():
    """All of them in this process, with what vLLM would read of each."""
    bodies: list[bytes] = []

    async def echo(request: Request) -> JSONResponse:
        bodies.append(await request.body())
        return JSONResponse({})

    class Engine:
        async def call_utility_all_async(self, method: str, text: str) -> list[str]:
            json.loads(text)
            return ["{}"]

    class Client:
        engine_core = Engine()

    app = Starlette(routes=[Route(path, echo, methods=["POST"]) for path in GENERATING])
    app.state.engine_client = Client()
    wrapped = ProgramIdMiddleware(app)
    *_, errors = middleware._counters()
    before, statuses = errors._value.get(), []

    async def send(message):
        statuses.append(message.get("status"))

    for request in REQUESTS:
        if any(name == b"X-data-parallel-rank" for name, _ in request.headers):
            continue

        async def receive(body=request.body):
            return {"type": "http.request", "body": body}

        raw = request.path
        scope = {"type": "http", "method": request.method, "app": app, "headers": []}
        scope |= {"path": unquote(raw), "raw_path": raw.encode(), "query_string": b""}
        scope["headers"] = [(name.lower(), value) for name, value in request.headers]
        bodies.clear()
        asyncio.run(wrapped(scope, receive, send))
        if request.path.startswith("/ttlcache/"):
            continue
        (got,) = bodies
        expected = read(request.body)
        if expected is None:
            assert read(got) is None
            continue
        found = read(got)
        for name in OURS:
            found.pop(name, None)
            expected.pop(name, None)
        assert json.dumps(found) == json.dumps(expected)
    assert errors._value.get() == before
    assert set(statuses) <= {200, 400, 404, 405, None}


def read(body: bytes) -> dict | None:
    """As vLLM reads a body."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
