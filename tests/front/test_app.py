"""The front as an application in this process: what goes wrong inside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.front.conftest import CHAT, front_before
from ttlcache_connector.front import app as app_module
from ttlcache_connector.front.app import Front
from ttlcache_connector.front.keys import rank_of
from ttlcache_connector.http.asgi import MAX_BODY_BYTES

pytestmark = pytest.mark.anyio
PARENT = {"X-Parent-Session-ID": "parent"}


class Asked:
    """A request to a front, and what its upstream got of it."""

    def __init__(self, upstream: Callable[[httpx.Request], httpx.Response]) -> None:
        def handle(request: httpx.Request) -> httpx.Response:
            self.requests.append(request)
            return upstream(request)

        self.requests: list[httpx.Request] = []
        self.front = front_before(httpx.MockTransport(handle), "http://up/base")

    async def ask(
        self, path: str = CHAT, method: str = "POST", **more: Any
    ) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.front)
        async with httpx.AsyncClient(transport=transport) as http:
            url = httpx.URL("http://f").copy_with(raw_path=path.encode())
            return await http.send(http.build_request(method, url, **more))


def answers(status: int = 200, **headers: str) -> Asked:
    def upstream(request: httpx.Request) -> httpx.Response:
        stream = httpx.ByteStream(b"served")
        return httpx.Response(status, headers=headers, stream=stream)

    return Asked(upstream)


def hints_of(request: httpx.Request) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.content)["kv_transfer_params"]
    return found["ttlcache"]


async def test_a_fault_of_ours_costs_the_key_and_not_the_answer(monkeypatch, caplog):
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(app_module, "find", broken)
    asked = answers()
    answer = await asked.ask(json={"x": 1}, headers={"X-Session-ID": "s"})
    assert answer.content == b"served"
    assert asked.requests[0].headers["x-session-id"] == "s"
    assert asked.requests[0].url == "http://up/base/v1/chat/completions"
    assert asked.front.status()["faults"] == 1
    assert "a bug" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("slow"),
        httpx.RemoteProtocolError("nonsense"),
        httpx.ReadError("reset"),
    ],
    ids=repr,
)
async def test_an_upstream_that_fails_is_502_whatever_the_reason(error):
    def upstream(request: httpx.Request) -> httpx.Response:
        raise error

    asked = Asked(upstream)
    refused = await asked.ask(json={})
    assert refused.status_code == 502
    assert refused.json()["error"]["type"] == "upstream_error"
    assert asked.front.status()["upstream_errors"] == 1


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/front/health", 200),
        ("/front/status", 200),
        ("/front/secrets", 404),
        # Administration is not for clients.
        ("/add_worker", 404),
        ("/remove_worker?url=x", 404),
        ("/pause", 404),
        ("/collective_rpc", 404),
        ("/v1/%2e%2e/pause", 404),
        ("/v1/load_lora_adapter", 404),
        ("/v1/unload_lora_adapte%72", 404),
        ("/sessions/me/v1/load_lora_adapter", 404),
        # Long enough to pass the server, too long with the upstream's own path.
        ("/v1/" + "y" * 65_530, 400),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_is_the_fronts_own_or_nobodys_does_not_go_on(path, status):
    asked = answers()
    method = "GET" if path.startswith("/front") else "POST"
    assert (await asked.ask(path, method)).status_code == status
    assert asked.requests == []


@pytest.mark.parametrize(
    "path", ["*", "", "/../admin", "/v1/../pause", "/v1/./models", "/v1/%2E%2e/pause"]
)
def test_a_path_that_means_another_one_is_refused(path):
    """Clients tidy up their URLs, so not through one."""
    front = Front("http://up")
    assert not front._may_pass(path)
    assert front._may_pass("/v1/models")


@pytest.mark.parametrize(
    ("body", "headers"),
    [({"session_id": "child"}, {}), ({}, {"X-Session-ID": "child"})],
)
async def test_a_child_keeps_its_own_name_when_it_follows(body, headers):
    """The header is the parent's key; the replica reads hints before it."""
    own = {"parent_id": "parent", "tool": "ls"}
    body |= {
        "messages": [{"role": "user", "content": "x"}],
        "kv_transfer_params": {"ttlcache": own},
    }
    asked = answers()
    assert (await asked.ask(json=body, headers=headers)).status_code == 200
    (request,) = asked.requests
    assert request.headers["x-session-id"] == "parent"
    assert hints_of(request) == {"program_id": "child", **own}


@pytest.mark.parametrize(
    "body",
    [
        b"x" * (MAX_BODY_BYTES + 1),
        # vLLM reads UTF-16, which ends in the byte of a bracket, too.
        json.dumps({"messages": []}).encode("utf-16-be"),
        b'{"kv_transfer_params": {"ttlcache": 1}}',
    ],
    ids=["long", "UTF-16", "hints that are none"],
)
async def test_a_child_whose_body_cannot_tell_its_name_tells_it_in_the_header(body):
    """Its parent would be told what is meant for it."""
    asked = answers()
    asked.front._ranks = 8
    for headers in ({"X-Session-ID": "parent"}, {"X-Session-ID": "child", **PARENT}):
        await asked.ask(content=body, headers=headers)
    parent, child = asked.requests
    assert child.headers["x-session-id"] == "child"
    assert child.content == body
    rank = "x-data-parallel-rank"
    assert child.headers[rank] == parent.headers[rank] == str(rank_of("parent", 8))


async def test_a_child_without_an_id_gets_one_that_stays():
    asked = answers()
    for turns in ("a", "ab", "o"):
        messages = [{"role": "user", "content": turn} for turn in turns]
        hints = {"parent_id": "parent", "is_last_step": True}
        body = {"messages": messages, "kv_transfer_params": {"ttlcache": hints}}
        await asked.ask(json=body)
    for request in asked.requests:
        assert request.headers["x-session-id"] == "parent"
    ids = [hints_of(request)["program_id"] for request in asked.requests]
    assert ids[0] == ids[1] != ids[2]
    assert "parent" not in ids


async def test_headers_for_the_next_hop_alone_go_no_further():
    """`Connection` names them; it takes neither our key nor the length away."""
    headers = {
        "Connection": "close, X-Hop , X-Session-ID, content-length",
        "X-Hop": "1",
        "X-Session-ID": "theirs",
        "X-TTLCache-Program": "named",
        "TE": "trailers",
    }
    own = {"Connection": "X-Hop", "X-Hop": "1", "Retry-After": "3"}
    asked = answers(503, **own)
    answer = await asked.ask(json={"x": 1}, headers=headers)
    (request,) = asked.requests
    assert {"connection", "x-hop", "te"}.isdisjoint(request.headers)
    assert request.headers["x-session-id"] == "named"
    assert request.headers["content-length"] == str(len(request.content))
    # Nor do those of an answer.
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "3"
    assert {"connection", "x-hop"}.isdisjoint(answer.headers)


@pytest.mark.parametrize(
    ("told", "given"),
    [
        ("http://up/base/v1/models?a=1", "/v1/models?a=1"),
        ("http://up/base", "http://up/base"),
        ("http://upper/base/v1", "http://upper/base/v1"),
        ("http://up/base//upper/v1", "http://up/base//upper/v1"),
        ("/v1/models", "/v1/models"),
        ("/base/v1/models?a=1", "/v1/models?a=1"),
        ("/baseless/v1", "/baseless/v1"),
        ("https://up/base/v1", "https://up/base/v1"),
    ],
)
async def test_a_redirect_does_not_lead_behind_the_front(told, given):
    """As vLLM answers a slash too many, with the host that it was asked at."""
    answer = await answers(307, Location=told).ask(json={})
    assert answer.headers["location"] == given


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
async def test_a_router_that_drops_headers_loses_nothing(headers, key, hints):
    asked = answers()
    await asked.ask("/v1/messages", json={"messages": []}, headers=headers)
    (request,) = asked.requests
    assert request.headers["x-session-id"] == key, "an agent's is its session's"
    assert hints_of(request) == hints


@pytest.mark.parametrize("more", [{}, {"user": "u"}])
async def test_a_billing_header_does_not_move_a_conversation(more):
    """It changes with every request of some clients that come through a proxy."""
    asked = answers()
    for turn in range(2):
        system = f"x-anthropic-billing-header: cc_version=2.1; cch=0{turn};You are"
        messages = [
            {"role": "system", "content": system},
            *({"role": "user", "content": f"task {n}"} for n in range(turn + 1)),
        ]
        await asked.ask(json={"messages": messages, **more})
    keys = {request.headers["x-session-id"] for request in asked.requests}
    assert len(keys) == 1
    assert asked.front.status()["faults"] == 0
