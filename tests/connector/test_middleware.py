"""The ASGI middleware in front of a plain Starlette application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from urllib.parse import quote, unquote

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.connector.conftest import fails, pinned
from ttlcache.programs.table import bounded
from ttlcache_connector.http import control
from ttlcache_connector.http import middleware as module
from ttlcache_connector.http.asgi import MAX_BODY_BYTES
from ttlcache_connector.http.middleware import ProgramIdMiddleware

CHAT = "/v1/chat/completions"
OWN = {"x-session-id": "own"}
HUGE = "x" * 1_000_000
END, PROGRESS = (f"/ttlcache/programs/p/{verb}" for verb in ("end", "progress"))
DEEP = b"[" * 500 + b"]" * 500


async def echo(request: Request) -> JSONResponse:
    raw = await request.body()
    return JSONResponse(
        {
            "path": request.url.path,
            "raw_path": request.scope["raw_path"].decode(),
            "session": request.headers.get("x-session-id"),
            "length": request.headers.get("content-length"),
            "bytes": len(raw),
            "body": raw.decode("utf-8", "replace")[:2000],
        }
    )


def application(*, api_key: list[str] | None = None, engine: object = None) -> object:
    app = Starlette(routes=[Route(CHAT, echo, methods=["POST"])])
    app.state.args = SimpleNamespace(api_key=api_key)
    app.state.engine_client = SimpleNamespace(engine_core=engine)
    app.add_middleware(ProgramIdMiddleware)
    return app


def post(app: object, path: str, *, root_path: str = "", **request: object):
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await http.post(path, **request)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("part", "session"),
    [
        ("s-9", "s-9"),
        ("a%2Fb", "a/b"),
        ("a%2541", "a%41"),
        ("..%2F..", "../.."),
        ("%20", None),
        ("%00", "sha256-"),
        ("%ff", "sha256-"),
        ("x" * 5000, "sha256-"),
        ("ttlcache", "ttlcache"),
    ],
)
def test_any_id_in_a_url_leads_to_the_same_answer(part, session):
    answer = post(application(), f"/sessions/{part}{CHAT}", json={}).json()
    assert answer["path"] == CHAT
    assert (answer["session"] or "").startswith(session or "")
    assert (answer["session"] is None) == (session is None)


def test_below_a_root_path():
    path = f"/api/sessions/a b{CHAT}"
    answer = post(application(), path, root_path="/api", json={}).json()
    assert answer["session"] == "a b"
    assert answer["path"] == answer["raw_path"] == f"/api{CHAT}"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"job_id"',
        b'{"user": [1, 2}',
        b"\xff\xfe",
        b'{"user": "u", "x": "' + b"y" * (MAX_BODY_BYTES + 1) + b'"}',
        b'{"job_id": {"a": ' + b"[" * 5000,
    ],
)
def test_what_we_cannot_read_passes_untouched(content):
    answer = post(application(), CHAT, content=content).json()
    assert answer["bytes"] == len(content)
    assert answer["session"] is None


def test_a_fault_of_ours_costs_the_identity_only(monkeypatch):
    monkeypatch.setattr(module, "from_headers", fails)
    *_, errors = module._counters()
    before = errors._value.get()
    answer = post(application(), CHAT, json={"x": 1}, headers={"session-id": "c"})
    assert answer.status_code == 200
    assert answer.json()["session"] is None
    assert errors._value.get() == before + 1


def test_twice_is_once():
    app = application()
    app.add_middleware(ProgramIdMiddleware)
    answer = post(app, f"/sessions/s{CHAT}", json={"job_id": "j"}).json()
    assert answer["session"] == "s"
    assert answer["body"].count("kv_transfer_params") == 1
    assert int(answer["length"]) == answer["bytes"]


def hints_of(program_id: str) -> dict:
    return {"kv_transfer_params": {"ttlcache": {"program_id": program_id}}}


@pytest.mark.parametrize(
    ("path", "body", "headers", "program"),
    [
        (CHAT, {}, {"session-id": "c-1"}, "c-1"),
        (CHAT, {}, OWN, "own"),
        (f"/sessions/a%2Fb{CHAT}", {}, {}, "a%2Fb"),
        (CHAT, {"job_id": 7}, {}, "7"),
        # What the engine goes by, whatever headers say.
        (CHAT, hints_of("hinted"), OWN, "hinted"),
        (CHAT, {"vllm_xargs": {"ttlcache_program_id": "x"}}, OWN, "x"),
        (CHAT, {"session_id": "body"}, OWN, "body"),
        (CHAT, {"session_id": HUGE}, {}, bounded(HUGE)),
        # What an answer told may be sent back.
        (CHAT, {}, {"x-ttlcache-program": "s%3Aa"}, "s%3Aa"),
        # Known to the engine alone, or nobody's.
        (CHAT, {}, {}, None),
        (CHAT, {}, {"x-session-id": "ttlcache-route-1"}, None),
    ],
)
def test_the_answer_names_its_program(path, body, headers, program):
    answer = post(application(), path, json=body, headers=headers)
    assert answer.headers.get("x-ttlcache-program") == program


@pytest.mark.parametrize(
    "headers",
    [
        {"x-session-id": "s" * 300},  # longer than an id may be
        {"x-session-id": "gr\xf6\xdfe".encode("latin-1")},
        {"session-id": "c" * 300},
        {"x-session-id": "ttlcache-route-1", "session-id": "c-1"},
        {"x-session-id": " ", "session-id": "c-1"},
    ],
)
def test_the_engine_knows_a_program_by_what_the_answer_says(headers):
    answer = post(application(), CHAT, json={}, headers=headers)
    told = unquote(answer.headers["x-ttlcache-program"])
    assert answer.json()["session"] == told


def test_a_refused_request_names_no_program():
    async def refuse(scope, receive, send):
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    app = application()
    app.router = refuse
    assert "x-ttlcache-program" not in post(app, CHAT, json={}, headers=OWN).headers


class Engines:
    """Data-parallel engines: what each answers to an order, and what they heard."""

    def __init__(self, *answers: Callable[[dict], dict]) -> None:
        self.answers = answers
        self.orders: list[dict] = []

    async def call_utility_all_async(self, method: str, text: str) -> list[str]:
        assert method == "ttlcache_control"
        self.orders.append(json.loads(text))
        return [json.dumps(answer(self.orders[-1])) for answer in self.answers]


def two_engines(*, known: bool = True) -> Engines:
    """One of which has never had a program."""
    return Engines(lambda _: {}, lambda _: {"known": known, "pins": []})


def test_end_and_progress_reach_every_engine():
    engine = two_engines()
    app = application(engine=engine)
    for escaped in ("a%2Fb", "a%252Fb"):
        path = f"/ttlcache/programs/{escaped}/end"
        assert post(app, path).json()["known"] is True
    assert post(app, PROGRESS, json={"done": 3, "total": 9}).status_code == 200
    assert engine.orders == [
        {"do": "end", "program_id": "a/b"},
        {"do": "end", "program_id": "a%2Fb", "as_sent": ["a/b"]},
        {"do": "progress", "program_id": "p", "done": 3, "total": 9},
    ]


@pytest.mark.parametrize("program_id", ["größe", " spaced ", "50%41", "plain"])
def test_an_id_from_the_body_is_known_by_its_url(make_engine, program_id):
    engine = make_engine()
    engine.turn("r", range(64), hints={"program_id": program_id})
    assert pinned(engine) > 0
    app = application(engine=Engines(engine.connector.control))
    told = post(app, CHAT, json=hints_of(program_id)).headers["x-ttlcache-program"]
    assert told == quote(program_id, safe="")
    url = f"/ttlcache/programs/{told}"
    assert post(app, f"{url}/progress", json={"eta_s": 1.0}).status_code == 200
    assert post(app, f"{url}/end").status_code == 200
    assert pinned(engine) == 0


def test_a_program_that_two_ranks_know_is_one_program():
    def rank(*pins: dict) -> Callable[[dict], dict]:
        found = {"known": True, "pins": list(pins), "gauges": {"pins_active": 1}}
        return lambda _: found

    def stranger(_: dict) -> dict:
        return {"known": False, "gauges": {"pins_active": 9}}

    def told(*ranks: Callable[[dict], dict]) -> dict:
        app = application(engine=Engines(stranger, *ranks))
        return post(app, PROGRESS, json={"done": 3, "total": 9}).json()

    assert told(rank({"kept": True}), rank({"kept": 0})) == {
        "program_id": "p",
        "known": True,
        "pins": [{"kept": True}, {"kept": 0}],
    }
    of_one = told(rank())["gauges"]
    assert of_one == {"pins_active": 1}, "of the engine that knows it"


NUMBERS = [b'"soon"', b"-1", b"NaN", b"%d" % (1 << 64), b"1" + b"0" * 4000]
NUMBERS += [b"1" + b"0" * 9000, DEEP, b"[" * 20_000 + b"]" * 20_000]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        *((PROGRESS, content) for content in (b"{", b"[1]", b'{"colour": 1}')),
        *((PROGRESS, b'{"eta_s": %s}' % number) for number in NUMBERS),
        (PROGRESS, b'"' + b"x" * 100_000 + b'"'),
        (PROGRESS, b'{"%s": 1}' % (b"x" * 60_000)),
        (PROGRESS, b'{"\\ud800": 1}'),
        (PROGRESS, b'{"cache_salt": %s}' % DEEP),
        (PROGRESS, b'{"cache_salt": "\\ud800"}'),
        (END, b'{"cache_salt": "%s"}' % (b"x" * 1025)),
        ("/ttlcache/programs/%20/end", b""),
        ("/ttlcache/nothing", b""),
    ],
)
def test_nonsense_is_refused_by_name(path, content):
    answer = post(application(engine=two_engines()), path, content=content)
    assert answer.status_code == (404 if path.endswith("nothing") else 400)
    assert answer.json()["error"]


def test_a_body_that_is_cut_off_ends_no_program():
    engine, sent = two_engines(), []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"app": application(engine=engine), "method": "POST", "headers": []}
    asyncio.run(control.answer(END, scope, receive, send))
    assert sent[0]["status"] == 400
    assert engine.orders == []


def test_an_unknown_program_is_404_and_a_dead_engine_503():
    assert post(application(engine=two_engines(known=False)), END).status_code == 404
    assert post(application(engine=object()), END).status_code == 503


def test_the_servers_key_is_asked_for():
    app = application(api_key=["k1", "k2"], engine=two_engines())
    assert post(app, END).status_code == 401
    good = ("Bearer k2", "bearer k1")  # vLLM takes either
    for given in (*good, "Bearer k3", "Basic k1", "k1", "Bearer ", "Bearer k1 "):
        answer = post(app, END, headers={"authorization": given})
        assert answer.status_code == (200 if given in good else 401), given


@pytest.mark.parametrize(("key", "held"), [(b"", 0), (b"Bearer k1", 1)])
def test_a_body_without_the_servers_key_is_not_held(key, held):
    """vLLM's own guard comes after the middleware, and refuses without reading."""
    received, at_guard = [], []

    async def receive():
        received.append(1)
        return {"type": "http.request", "body": b"{}"}

    async def guard(scope, receive, send):
        at_guard.append(len(received))

    scope = {"type": "http", "method": "POST", "path": CHAT}
    scope |= {"app": application(api_key=["k1"]), "headers": [(b"authorization", key)]}
    asyncio.run(ProgramIdMiddleware(guard)(scope, receive, None))
    assert at_guard == [held]


def test_what_is_dropped_is_counted_by_reason():
    _, dropped, errors = module._counters()
    reasons = ("id_type", "id_range", "id_encoding", "nested_too_deep")

    def counts() -> list[int]:
        return [dropped.labels(reason)._value.get() for reason in reasons]

    before, faults, series = counts(), errors._value.get(), len(dropped._metrics)
    deep = DEEP.decode()
    for value in (deep, str(1 << 64), r'"\ud800"'):
        sent = f'{{"messages":[],"job_id":{value}}}'
        answer = post(application(), CHAT, content=sent).json()
        assert (answer["session"], answer["body"]) == (None, sent)
    sent = f'{{"kv_transfer_params":{{"x":{deep}}}}}'
    answer = post(application(), CHAT, content=sent).json()
    assert answer["body"] == sent[:-1] + ',"kv_transfer_params":{}}'
    assert int(answer["length"]) == answer["bytes"]
    assert counts() == [count + 1 for count in before]
    assert (errors._value.get(), len(dropped._metrics)) == (faults, series)
