"""The front as an application in this process: what goes wrong inside it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from ttlcache_connector.front import app as app_module
from ttlcache_connector.front.app import Front
from ttlcache_connector.front.replicas import PressureBound, Replicas


def post(front: Front, **request: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=front)
        async with httpx.AsyncClient(transport=transport, base_url="http://f") as http:
            return await http.post("/v1/chat/completions", **request)

    return asyncio.run(ask())


def front_before(answer: Any) -> Front:
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return Front("http://up/base", Replicas((), PressureBound()), client=client)


def test_a_fault_of_ours_costs_the_key_and_not_the_answer(monkeypatch, caplog):
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(app_module, "find", broken)
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, stream=httpx.ByteStream(b"served"))

    front = front_before(answer)
    session = {"X-Session-ID": "s"}
    assert post(front, json={"x": 1}, headers=session).content == b"served"
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
        assert post(front, json={}).status_code == 502
        assert front.status()["upstream_errors"] == 1


def test_other_paths_of_its_own_do_not_exist():
    front = front_before(lambda request: httpx.Response(200))

    async def ask(path: str) -> int:
        transport = httpx.ASGITransport(app=front)
        async with httpx.AsyncClient(transport=transport, base_url="http://f") as http:
            return (await http.get(path)).status_code

    assert asyncio.run(ask("/front/health")) == 200
    assert asyncio.run(ask("/front/status")) == 200
    assert asyncio.run(ask("/front/secrets")) == 404
