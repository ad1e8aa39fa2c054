"""The front as an application in this process: what goes wrong inside it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from ttlcache_connector.front import app as app_module
from ttlcache_connector.front.app import Front
from ttlcache_connector.front.replicas import PressureBound, Replicas


def ask(
    front: Front, path: str = "/v1/chat/completions", method: str = "POST", **more: Any
) -> httpx.Response:
    async def answered() -> httpx.Response:
        transport = httpx.ASGITransport(app=front)
        async with httpx.AsyncClient(transport=transport) as http:
            url = httpx.URL("http://f").copy_with(raw_path=path.encode())
            return await http.send(http.build_request(method, url, **more))

    return asyncio.run(answered())


def front_before(answer: Any) -> Front:
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return Front("http://up/base", Replicas((), PressureBound()), client=client)


def front_and_what_it_sends() -> tuple[Front, list[httpx.Request]]:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, stream=httpx.ByteStream(b"served"))

    return front_before(answer), seen


def test_a_fault_of_ours_costs_the_key_and_not_the_answer(monkeypatch, caplog):
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(app_module, "find", broken)
    front, seen = front_and_what_it_sends()
    session = {"X-Session-ID": "s"}
    assert ask(front, json={"x": 1}, headers=session).content == b"served"
    assert seen[0].headers["x-session-id"] == "s"
    assert seen[0].url == "http://up/base/v1/chat/completions"
    assert front.status()["faults"] == 1
    assert "a bug" in caplog.text


def test_an_upstream_that_fails_is_502_whatever_the_reason():
    for error in (
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("slow"),
        httpx.RemoteProtocolError("nonsense"),
        httpx.ReadError("reset"),
    ):

        def answer(request: httpx.Request, error: Exception = error) -> httpx.Response:
            raise error

        front = front_before(answer)
        refused = ask(front, json={})
        assert refused.status_code == 502
        assert refused.json()["error"]["type"] == "upstream_error"
        assert front.status()["upstream_errors"] == 1


def test_other_paths_of_its_own_do_not_exist():
    front = front_before(lambda request: httpx.Response(200))
    paths = {"/front/health": 200, "/front/status": 200, "/front/secrets": 404}
    assert {path: ask(front, path, "GET").status_code for path in paths} == paths


def seen_by_upstream(*path: str, **request: Any) -> tuple[int, list[httpx.Request]]:
    """The answer's status, and what the upstream got."""
    front, seen = front_and_what_it_sends()
    return ask(front, *path, **request).status_code, seen


@pytest.mark.parametrize(
    "path",
    [
        "/add_worker",
        "/remove_worker?url=x",
        "/pause",
        "/collective_rpc",
        "/v1/%2e%2e/pause",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapte%72",
        "/sessions/me/v1/load_lora_adapter",
    ],
)
def test_administration_is_not_for_clients(path):
    status, seen = seen_by_upstream(path)
    assert (status, seen) == (404, [])


@pytest.mark.parametrize(
    "path", ["*", "", "/../admin", "/v1/../pause", "/v1/./models", "/v1/%2E%2e/pause"]
)
def test_a_path_that_means_another_one_is_refused(path):
    """Clients tidy up their URLs, so not through one."""
    for every_path in (False, True):
        front = Front("http://up", Replicas((), PressureBound()), every_path=every_path)
        assert not front._may_pass(path)
    assert front._may_pass("/v1/models")


def test_a_url_that_cannot_be_passed_on_is_the_clients_fault():
    """Long enough to pass the server, too long with the upstream's own path."""
    status, seen = seen_by_upstream("/v1/" + "y" * 65_530)
    assert (status, seen) == (400, [])


@pytest.mark.parametrize(
    ("body", "headers"),
    [({"session_id": "child"}, {}), ({}, {"X-Session-ID": "child"})],
)
def test_a_child_keeps_its_own_name_when_it_follows(body, headers):
    """The header is the parent's key; the replica reads hints before it."""
    own = {"parent_id": "parent", "tool": "ls"}
    body |= {
        "messages": [{"role": "user", "content": "x"}],
        "kv_transfer_params": {"ttlcache": own},
    }
    status, (request,) = seen_by_upstream(json=body, headers=headers)
    assert status == 200
    assert request.headers["x-session-id"] == "parent"
    hints = json.loads(request.content)["kv_transfer_params"]["ttlcache"]
    assert hints == {"program_id": "child", **own}


def test_a_child_without_an_id_gets_one_that_stays():
    def body(*turns: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": turn} for turn in turns]
        hints = {"parent_id": "parent", "is_last_step": True}
        return {"messages": messages, "kv_transfer_params": {"ttlcache": hints}}

    ids = []
    for asked in (body("a"), body("a", "b"), body("other")):
        _, (request,) = seen_by_upstream(json=asked)
        assert request.headers["x-session-id"] == "parent"
        hints = json.loads(request.content)["kv_transfer_params"]["ttlcache"]
        ids.append(hints["program_id"])
    assert ids[0] == ids[1] != ids[2]
    assert "parent" not in ids


def test_headers_for_the_next_hop_alone_go_no_further():
    """`Connection` names them; it takes neither our key nor the length away."""
    headers = {
        "Connection": "close, X-Hop , X-Session-ID, content-length",
        "X-Hop": "1",
        "X-Session-ID": "theirs",
        "X-TTLCache-Program": "named",
        "TE": "trailers",
    }
    status, (request,) = seen_by_upstream(json={"x": 1}, headers=headers)
    assert status == 200
    assert {"connection", "x-hop", "te"}.isdisjoint(request.headers)
    assert request.headers["x-session-id"] == "named"
    assert request.headers["content-length"] == str(len(request.content))


def test_nor_do_those_of_an_answer():
    def answer(request: httpx.Request) -> httpx.Response:
        headers = {"Connection": "X-Hop", "X-Hop": "1", "Retry-After": "3"}
        return httpx.Response(503, headers=headers, stream=httpx.ByteStream(b""))

    given = ask(front_before(answer), json={})
    assert given.status_code == 503
    assert given.headers["retry-after"] == "3"
    assert {"connection", "x-hop"}.isdisjoint(given.headers)


def test_a_websocket_is_refused_and_not_left_without_an_answer():
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    front = front_before(lambda request: httpx.Response(200))
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    asyncio.run(front(scope, receive, send))
    assert sent == [{"type": "websocket.close"}]


@pytest.mark.parametrize(
    ("told", "given"),
    [
        ("http://up/base/v1/models?a=1", "/v1/models?a=1"),
        ("http://up/base", "http://up/base"),
        ("http://upper/base/v1", "http://upper/base/v1"),
        ("http://up/base//upper/v1", "http://up/base//upper/v1"),
        ("/v1/models", "/v1/models"),
        ("/base/v1/models?a=1", "/v1/models?a=1"),
        ("/base//upper/v1", "/base//upper/v1"),
        ("/baseless/v1", "/baseless/v1"),
        ("http://up:80/base/v1#end", "/v1#end"),
        ("https://up/base/v1", "https://up/base/v1"),
        ("//up/base/v1", "//up/base/v1"),
        ("http://[", "http://["),
    ],
)
def test_a_redirect_does_not_lead_behind_the_front(told, given):
    """As vLLM answers a slash too many, with the host that it was asked at."""

    def answer(request: httpx.Request) -> httpx.Response:
        headers = {"Location": told}
        return httpx.Response(307, headers=headers, stream=httpx.ByteStream(b""))

    assert ask(front_before(answer), json={}).headers["location"] == given


SESSION = {"X-Claude-Code-Session-Id": "s"}
AGENT = SESSION | {"X-Claude-Code-Agent-Id": "a"}


@pytest.mark.parametrize(
    ("headers", "key", "hints"),
    [
        (SESSION, "s", {"program_id": "s"}),
        (AGENT, "s", {"program_id": "s:a", "parent_id": "s"}),
        (
            SESSION | {"X-Session-Final": "true"},
            "s",
            {"program_id": "s", "is_last_step": True},
        ),
    ],
)
def test_a_router_that_drops_headers_loses_nothing_that_they_say(headers, key, hints):
    _, seen = seen_by_upstream("/v1/messages", json={"messages": []}, headers=headers)
    (request,) = seen
    assert request.headers["x-session-id"] == key, "an agent's is its session's"
    sent = json.loads(request.content)
    assert sent["kv_transfer_params"] == {"ttlcache": hints}
