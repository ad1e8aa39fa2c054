"""Many at once, some of them slow, some gone: afterwards nothing is left of them.

A real uvicorn with the front in this process, so that its tasks can be counted, before
the light upstream in another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import httpx
import pytest
import uvicorn

from bench.serve.ports import free_ports
from tests.front.conftest import CHAT, HANG_S
from ttlcache_connector.front.app import Front
from ttlcache_connector.front.forward import upstream_client
from ttlcache_connector.front.upload import Room

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(4 * HANG_S)]

STREAMS, SLOW, GONE, EVENTS = 200, 50, 20, 20
PIECE = b"x" * 20_000


@contextlib.asynccontextmanager
async def serving(front: Front) -> AsyncIterator[int]:
    """The port of a uvicorn with it, started as `ttlcache front` does."""
    (port,) = free_ports(1)
    config = uvicorn.Config(
        front, port=port, log_level="error", date_header=False, server_header=False
    )
    server = uvicorn.Server(config)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve)
        await until(lambda: server.started)
        yield port
        server.should_exit = True


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(HANG_S):
        while not condition():
            await anyio.sleep(0.01)


async def stream(client: httpx.AsyncClient, number: int) -> tuple[int, int]:
    """Status and events of one turn of one program."""
    headers = {"X-Session-ID": f"load-{number}"}
    asked = {"events": EVENTS, "messages": [{"role": "user", "content": "x" * 5000}]}
    async with client.stream("POST", CHAT, json=asked, headers=headers) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    return answer.status_code, len(lines)


async def slow(port: int, finish: asyncio.Event) -> bytes:
    """A client whose body stops halfway until all others are done."""
    body = json.dumps({"messages": PIECE.decode(), "status": 200}).encode()
    reader, writer = await begin(port, body)
    await finish.wait()
    writer.write(body[len(PIECE) :])
    head = await reader.readuntil(b"\r\n")
    await close(writer)
    return head


async def gone(port: int) -> None:
    """A client that leaves amid its body."""
    _, writer = await begin(port, PIECE * 2)
    await close(writer)


async def begin(port: int, body: bytes) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[: len(PIECE)])
    await writer.drain()
    return reader, writer


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def load(front: Front, port: int) -> None:
    finish = asyncio.Event()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=HANG_S, limits=limits
    ) as client:
        waiting = [asyncio.create_task(slow(port, finish)) for _ in range(SLOW)]
        await until(lambda: front.status()["under_way"] == SLOW)
        answers = await asyncio.gather(
            *(stream(client, number) for number in range(STREAMS)),
            *(gone(port) for _ in range(GONE)),
        )
    assert answers[:STREAMS] == [(200, EVENTS + 1)] * STREAMS
    await until(lambda: front.status()["under_way"] == SLOW)
    held = front.status()["held_bytes"]
    assert held <= SLOW * len(PIECE), "of the slow ones alone"
    finish.set()
    assert set(await asyncio.gather(*waiting)) == {b"HTTP/1.1 200 OK\r\n"}


async def test_nothing_is_left_of_a_load(upstreams):
    """Of the bodies that stop halfway only a half may be held."""
    client = upstream_client()
    client.timeout = None  # however slow this machine is
    front = Front(
        upstreams["left"].base_url,
        client=client,
        room=Room(SLOW * len(PIECE) // 2, timeout_s=2 * HANG_S),
    )
    async with serving(front) as port:
        before = asyncio.all_tasks()
        await load(front, port)
        await until(lambda: front.status()["under_way"] == 0)
        await until(lambda: asyncio.all_tasks() <= before)
        status = front.status()
    assert status["held_bytes"] == 0
    assert (status["faults"], status["upstream_errors"]) == (0, 0)
    assert status["bodies_late"] == 0
