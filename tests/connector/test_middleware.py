"""The ASGI middleware in front of a plain Starlette application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from urllib.parse import quote

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from tests.connector.conftest import pinned
from ttlcache_connector.engine import hooks
from ttlcache_connector.http import control
from ttlcache_connector.http import middleware as module
from ttlcache_connector.http.asgi import MAX_BODY_BYTES
from ttlcache_connector.http.middleware import ProgramIdMiddleware


async def echo(request: Request) -> JSONResponse:
    raw = await request.body()
    return JSONResponse(
        {
            "path": request.url.path,
            "session": request.headers.get("x-session-id"),
            "length": request.headers.get("content-length"),
            "bytes": len(raw),
            "body": raw.decode("utf-8", "replace")[:2000],
        }
    )


async def stream(request: Request) -> StreamingResponse:
    await request.body()

    async def parts():
        for part in (b"data: 1\n\n", b"data: 2\n\n"):
            yield part

    return StreamingResponse(parts(), media_type="text/event-stream")


def application(*, api_key: list[str] | None = None, engine: object = None) -> object:
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", echo, methods=["POST"]),
            Route("/v1/completions", stream, methods=["POST"]),
        ]
    )
    app.state.args = SimpleNamespace(api_key=api_key)
    app.state.engine_client = SimpleNamespace(engine_core=engine)
    app.add_middleware(ProgramIdMiddleware)
    return app


async def call(app: object, method: str, path: str, **kwargs: object):
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        return await http.request(method, path, **kwargs)


def post(app: object, path: str, **kwargs: object):
    return asyncio.run(call(app, "POST", path, **kwargs))


CHAT = "/v1/chat/completions"
OWN = {"x-session-id": "own"}


def nested_json(name: str, depth: int) -> bytes:
    return b'{"%s": %s%s}' % (name.encode(), b"[" * depth, b"]" * depth)


@pytest.mark.parametrize(("own", "session"), [({}, "c-1"), (OWN, "own")])
def test_an_agents_header_becomes_vllms_unless_that_is_there(own, session):
    headers = {"session-id": "c-1", **own}
    assert post(application(), CHAT, json={}, headers=headers).json()["session"] == (
        session
    )


def test_the_url_names_a_session_and_is_rewritten():
    answer = post(application(), f"/sessions/s-9{CHAT}", json={"a": 1}).json()
    assert (answer["session"], answer["path"]) == ("s-9", CHAT)


@pytest.mark.parametrize(
    ("part", "session"),
    [
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


def test_a_url_below_the_servers_root():
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope)

    path = f"/below/sessions/a b{CHAT}"
    scope = {"type": "http", "method": "GET", "root_path": "/below", "path": path}
    scope |= {"raw_path": quote(path).encode(), "headers": []}
    asyncio.run(ProgramIdMiddleware(app)(scope, None, None))
    assert (seen["path"], seen["raw_path"]) == (
        f"/below{CHAT}",
        f"/below{CHAT}".encode(),
    )


def test_below_a_root_path():
    transport = httpx.ASGITransport(app=application(), root_path="/api")

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await http.post(f"/api/sessions/s-9{CHAT}", json={})

    answer = asyncio.run(ask()).json()
    assert (answer["session"], answer["path"]) == ("s-9", f"/api{CHAT}")


def test_added_hints_arrive_with_the_right_length():
    sent = {"job_id": "j", "messages": []}
    answer = post(application(), CHAT, json=sent).json()
    assert answer["session"] == "j"
    assert int(answer["length"]) == answer["bytes"]
    assert json.loads(answer["body"])["kv_transfer_params"] == {"job_id": "j"}


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
    def broken(_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(module, "from_headers", broken)
    *_, errors = module._counters()
    before = errors._value.get()
    answer = post(application(), CHAT, json={"x": 1}, headers={"session-id": "c"})
    assert answer.status_code == 200
    assert answer.json()["session"] is None
    assert errors._value.get() == before + 1


def test_streams_pass_piece_by_piece():
    answer = post(application(), "/v1/completions", json={"user": "u"})
    assert answer.text == "data: 1\n\ndata: 2\n\n"


def test_twice_is_once():
    app = application()
    app.add_middleware(ProgramIdMiddleware)
    answer = post(app, f"/sessions/s{CHAT}", json={"job_id": "j"}).json()
    assert answer["session"] == "s"
    assert answer["body"].count("kv_transfer_params") == 1


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
    assert post(app, "/ttlcache/programs/a%2Fb/end").json()["known"] is True
    done = post(app, "/ttlcache/programs/p/progress", json={"done": 3, "total": 9})
    assert done.status_code == 200
    assert engine.orders == [
        {"do": "end", "program_id": "a/b"},
        {"do": "progress", "program_id": "p", "done": 3, "total": 9},
    ]


@pytest.mark.parametrize("program_id", ["größe", " spaced ", "50%41", "plain"])
def test_an_id_from_the_body_is_known_by_its_url(make_engine, program_id):
    engine = make_engine()
    engine.turn("r", range(64), hints={"program_id": program_id})
    assert pinned(engine) > 0
    app = application(engine=Engines(engine.connector.control))
    url = f"/ttlcache/programs/{quote(program_id, safe='')}"
    assert post(app, f"{url}/progress", json={"eta_s": 1.0}).status_code == 200
    assert post(app, f"{url}/end").status_code == 200
    assert pinned(engine) == 0


def test_a_program_that_two_ranks_know_is_one_program():
    def rank(*pins: dict) -> Callable[[dict], dict]:
        found = {"known": True, "pins": list(pins), "gauges": {"pins_active": 1}}
        return lambda _: found

    def stranger(_: dict) -> dict:
        return {"known": False, "gauges": {"pins_active": 9}}

    app = application(engine=Engines(stranger, rank({"kept": True}), rank({"kept": 0})))
    path, done = "/ttlcache/programs/p/progress", {"done": 3, "total": 9}
    assert post(app, path, json=done).json() == {
        "program_id": "p",
        "known": True,
        "pins": [{"kept": True}, {"kept": 0}],
    }
    one = post(application(engine=Engines(stranger, rank())), path, json=done).json()
    assert one["gauges"] == {"pins_active": 1}, "of the engine that knows it"


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/ttlcache/programs/p/progress", b"{", 400),
        ("/ttlcache/programs/p/progress", b"[1]", 400),
        ("/ttlcache/programs/p/progress", b'{"eta_s": "soon"}', 400),
        ("/ttlcache/programs/p/progress", b'{"eta_s": -1}', 400),
        ("/ttlcache/programs/p/progress", b'{"eta_s": NaN}', 400),
        ("/ttlcache/programs/p/progress", b'{"eta_s": %d}' % (1 << 64), 400),
        ("/ttlcache/programs/p/progress", b'{"eta_s": 1%s}' % (b"0" * 4000), 400),
        ("/ttlcache/programs/p/progress", b'{"eta_s": 1%s}' % (b"0" * 9000), 400),
        ("/ttlcache/programs/p/progress", nested_json("eta_s", 900), 400),
        ("/ttlcache/programs/p/progress", nested_json("eta_s", 20_000), 400),
        ("/ttlcache/programs/p/progress", nested_json("cache_salt", 500), 400),
        ("/ttlcache/programs/p/progress", b'{"cache_salt": "\\ud800"}', 400),
        ("/ttlcache/programs/p/progress", b'{"\\ud800": 1}', 400),
        ("/ttlcache/programs/p/progress", b'{"%s": 1}' % (b"x" * 60_000), 400),
        ("/ttlcache/programs/p/end", b'{"cache_salt": "%s"}' % (b"x" * 1025), 400),
        ("/ttlcache/programs/p/progress", b'{"colour": 1}', 400),
        ("/ttlcache/programs/p/progress", b'"' + b"x" * 100_000 + b'"', 400),
        ("/ttlcache/programs/%20/end", b"", 400),
        ("/ttlcache/nothing", b"", 404),
    ],
)
def test_nonsense_is_refused_by_name(path, content, status):
    answer = post(application(engine=two_engines()), path, content=content)
    assert answer.status_code == status
    assert answer.json()["error"]


def test_a_body_that_is_cut_off_ends_no_program():
    engine, sent = two_engines(), []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    path = "/ttlcache/programs/p/end"
    scope = {"app": application(engine=engine), "method": "POST", "headers": []}
    asyncio.run(control.answer(path, scope, receive, send))
    assert sent[0]["status"] == 400
    assert engine.orders == []


def test_an_unknown_program_is_404_and_a_dead_engine_503():
    path = "/ttlcache/programs/p/end"
    assert post(application(engine=two_engines(known=False)), path).status_code == 404
    assert post(application(engine=object()), path).status_code == 503


def test_the_servers_key_is_asked_for():
    app = application(api_key=["k1", "k2"], engine=two_engines())
    path = "/ttlcache/programs/p/end"
    assert post(app, path).status_code == 401
    for given in ("Bearer k2", "bearer k1"):  # vLLM takes either
        assert post(app, path, headers={"authorization": given}).status_code == 200
    for given in ("Bearer k3", "Basic k1", "k1", "Bearer ", "Bearer k1 "):
        assert post(app, path, headers={"authorization": given}).status_code == 401


@pytest.mark.parametrize(("key", "held"), [(b"", 0), (b"Bearer k1", 1)])
def test_a_body_without_the_servers_key_is_not_held(key, held):
    """vLLM's own guard comes after the middleware, and refuses without reading."""
    received = []

    async def receive():
        received.append(1)
        return {"type": "http.request", "body": b"{}"}

    async def guard(scope, receive, send):
        assert len(received) == held

    scope = {"type": "http", "method": "POST", "path": CHAT}
    scope |= {"app": application(api_key=["k1"]), "headers": [(b"authorization", key)]}
    asyncio.run(ProgramIdMiddleware(guard)(scope, receive, None))


def test_the_plugin_adds_it_to_the_servers_list_once(monkeypatch):
    calls = []
    fake = SimpleNamespace(
        init_entrypoints_middleware=lambda args, app, tasks: calls.append(
            args.middleware
        )
    )
    monkeypatch.setitem(hooks.sys.modules, hooks._APP_MODULE, fake)
    hooks.install_middleware("a.B")
    hooks.install_middleware("a.B")
    fake.init_entrypoints_middleware(SimpleNamespace(middleware=["x.Y"]), None, ())
    fake.init_entrypoints_middleware(SimpleNamespace(middleware=["a.B"]), None, ())
    assert calls == [["x.Y", "a.B"], ["a.B"]]


def test_a_vllm_that_answers_for_all_its_engines_at_once():
    class Older:
        async def call_utility_async(self, method: str, text: str) -> str:
            return json.dumps({"known": True, "order": json.loads(text)})

    answer = post(application(engine=Older()), "/ttlcache/programs/p/end")
    assert answer.json()["order"] == {"do": "end", "program_id": "p"}


def test_the_engines_method_finds_our_connector(monkeypatch):
    from vllm.v1.engine.core import EngineCore

    from ttlcache_connector import connector as connector_module

    class Ours:
        def control(self, order: dict) -> dict:
            return {"did": order["do"]}

    monkeypatch.setattr(connector_module, "find_connector", lambda c: c)
    monkeypatch.setattr(EngineCore, "ttlcache_control", None, raising=False)
    hooks.expose_control(connector_module._control)
    for found, expected in ((Ours(), {"did": "end"}), (None, {})):
        core = SimpleNamespace(scheduler=SimpleNamespace(connector=found))
        assert (
            json.loads(EngineCore.ttlcache_control(core, '{"do": "end"}')) == expected
        )


def test_what_is_dropped_is_counted_by_reason():
    _, dropped, errors = module._counters()
    reasons = ("id_type", "id_range", "id_encoding", "nested_too_deep")
    before = [dropped.labels(reason)._value.get() for reason in reasons]
    faults, series = errors._value.get(), len(dropped._metrics)
    deep = "[" * 500 + "]" * 500
    for value in (deep, str(1 << 64), r'"\ud800"'):
        sent = f'{{"messages":[],"job_id":{value}}}'
        answer = post(application(), CHAT, content=sent).json()
        assert (answer["session"], answer["body"]) == (None, sent)
    sent = f'{{"kv_transfer_params":{{"x":{deep}}}}}'
    answer = post(application(), CHAT, content=sent).json()
    assert answer["body"] == sent[:-1] + ',"kv_transfer_params":{}}'
    assert int(answer["length"]) == answer["bytes"]
    after = [dropped.labels(reason)._value.get() for reason in reasons]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 1, 1]
    assert (errors._value.get(), len(dropped._metrics)) == (faults, series)
