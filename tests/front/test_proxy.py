"""What passes through the front: everything, as it came, both ways, at once."""

from __future__ import annotations

import gzip
import json
import socket

import httpx
import pytest

from bench.compare.fleet.front import Front
from tests.front.conftest import CHAT, HANG_S
from tests.front.upstream import OWN_HEADERS
from tests.waiting import becomes
from ttlcache_connector.front.keys import rank_of


@pytest.fixture(scope="module")
def direct(upstreams, folder):
    """Before one upstream with four data-parallel ranks, and no router."""
    url, log = upstreams["left"].base_url, folder / "direct.log"
    with Front(url, log, ("--ranks", "4")) as front:
        yield front


@pytest.fixture
def http(direct):
    with httpx.Client(base_url=direct.base_url, timeout=HANG_S) as client:
        yield client


@pytest.fixture
def upstream(upstreams):
    with httpx.Client(base_url=upstreams["left"].base_url, timeout=HANG_S) as client:
        yield client


def state(upstream: httpx.Client) -> dict[str, int]:
    return upstream.get("/state").json()


def left(upstream: httpx.Client) -> int:
    return state(upstream)["left"]


def connect(front: Front) -> socket.socket:
    address = ("127.0.0.1", httpx.URL(front.base_url).port)
    return socket.create_connection(address, timeout=HANG_S)


def raw_post(front: Front, body: bytes) -> socket.socket:
    """The connection on which a request has just gone out."""
    connection = connect(front)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def raw_get(front: Front, path: bytes) -> bytes:
    """The answer as it comes, to a request with no header but one."""
    with connect(front) as connection:
        head = b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        connection.sendall(b"GET " + path + head)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_request_passes_as_it_came(http):
    body = b'{ "model":"tiny",  "user": "u", "x": [1, 2.50, "\\u00e4"] }\n'
    answer = http.post(
        "/v1/embeddings?a=1&b=%2F",
        content=body,
        headers={"Authorization": "Bearer k", "X-Own": "yes"},
    ).json()
    assert answer["body"].encode() == body
    assert answer["query"] == "a=1&b=%2F"
    assert answer["headers"]["authorization"] == "Bearer k"
    assert answer["headers"]["x-own"] == "yes"
    assert "x-session-id" not in answer["headers"]
    escaped = "/v1/models/org%2Fname%20x"
    assert http.get(escaped).json()["raw_path"] == escaped


def test_no_header_is_made_up_or_comes_twice(direct):
    """Such as encodings that this client could not undo, or a proxy's own `date`."""
    head, _, body = raw_get(direct, b"/v1/models").partition(b"\r\n\r\n")
    assert set(json.loads(body)["headers"]) == {"host"}
    lines = head.decode().splitlines()[1:]
    headers = [tuple(line.lower().split(": ", 1)) for line in lines]
    own = [h for h in headers if h[0] in ("date", "server")]
    assert sorted(own) == sorted((k, v.lower()) for k, v in OWN_HEADERS)


@pytest.mark.parametrize("name", ["two\r\nX-Evil: 1", "naïve", "\u0000", "x" * 256])
def test_any_id_makes_a_header(http, name):
    hints = {"ttlcache": {"program_id": name}}
    answer = http.post(CHAT, json={"kv_transfer_params": hints}).json()
    assert answer["headers"]["x-session-id"].isprintable()
    assert "x-evil" not in answer["headers"]


@pytest.mark.parametrize("status", [200, 400, 404, 429, 500, 503])
def test_the_status_is_the_upstreams(http, status):
    assert http.post(CHAT, json={"status": status}).status_code == status


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"[]",
        b'"text"',
        b"{}",
        b"\xff\xfe",
        b'{"messages": 3, "prompt": {"a": 1}}',
        b'{"kv_transfer_params": [1], "vllm_xargs": "no"}',
        b"[" * 60_000,
        gzip.compress(b'{"messages": []}', mtime=0),
    ],
)
def test_without_identity_a_turn_passes_unchanged(http, body):
    answer = http.post(CHAT, content=body).json()
    assert answer["size"] == len(body)
    assert answer["body"].encode() == body or not body.isascii()
    assert "x-session-id" not in answer["headers"]
    assert "x-data-parallel-rank" not in answer["headers"]


def test_a_body_longer_than_what_is_read_is_streamed(http):
    messages = [{"role": "user", "content": "x" * 9_000_000}]
    answer = http.post(
        CHAT, json={"messages": messages}, headers={"session-id": "long"}
    ).json()
    assert answer["size"] > 9_000_000
    assert answer["headers"]["x-session-id"] == "long"


def test_a_body_in_chunks_passes(http):
    def chunks():
        for _ in range(20):
            yield b" " * 50_000
        yield b'{"prompt": "comes in pieces"}'

    answer = http.post("/v1/completions", content=chunks()).json()
    assert answer["size"] == 1_000_000 + 29
    assert answer["headers"]["x-session-id"].startswith("ttlcache-route-")


def test_events_arrive_one_by_one(http, upstream):
    """None waits for the end, which is a thousand events away."""
    before = left(upstream)
    with http.stream("POST", CHAT, json={"events": 1_000_000}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        seen = [json.loads(next(lines).removeprefix("data: "))["number"]]
        next(lines)
        seen.append(json.loads(next(lines).removeprefix("data: "))["number"])
        assert seen == [0, 1]
    assert becomes(lambda: left(upstream) == before + 1, HANG_S), "it streams to nobody"


def test_a_client_that_leaves_before_the_answer_is_told_upstream(direct, upstream):
    before, held = left(upstream), state(upstream)["held"]
    with raw_post(direct, b'{"hold": true}'):
        assert becomes(lambda: state(upstream)["held"] == held + 1, HANG_S)
        assert left(upstream) == before
    assert becomes(lambda: left(upstream) == before + 1, HANG_S)


def test_a_slow_reader_holds_the_upstream_back(direct, http, upstream):
    """Nothing is piled up in between: memory is bounded by the sockets' buffers.

    Another client of the same front and upstream, which reads all of its own flood,
    tells how long is long enough. It is not held up.
    """
    before = state(upstream)["streamed"]
    with raw_post(direct, b'{"flood": 2000}') as connection:  # MiB
        assert connection.recv(100)
        with http.stream("POST", CHAT, json={"flood": 300}) as answer:
            read = sum(len(piece) for piece in answer.iter_raw())
        assert read == 300 * 2**20
        streamed = state(upstream)["streamed"] - before
        assert streamed - 300 < 100, "MiB that nobody has read"


def test_an_answer_that_breaks_off_does_not_look_whole(http):
    with (
        pytest.raises(httpx.RemoteProtocolError),
        http.stream("POST", CHAT, json={"breaks": True}) as answer,
    ):
        answer.read()


def test_a_program_keeps_to_its_data_parallel_rank(http):
    def rank(name: str, **headers: str) -> str:
        answer = http.post(CHAT, json={}, headers={"X-Session-ID": name, **headers})
        return answer.json()["headers"]["x-data-parallel-rank"]

    ranks = {f"p{i}": rank(f"p{i}") for i in range(40)}
    assert set(ranks.values()) == {"0", "1", "2", "3"}
    assert all(rank(name) == value for name, value in ranks.items())
    assert all(str(rank_of(name, 4)) == value for name, value in ranks.items())
    assert rank("p0", **{"X-data-parallel-rank": "7"}) == "7", "the client's own"
