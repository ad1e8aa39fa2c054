"""The rank that a `/v1/responses` request names is that request's only."""

from __future__ import annotations

import contextvars
from types import SimpleNamespace

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tests.connector.test_middleware import application, post
from ttlcache_connector.http.dp_rank import RANK_HEADER, RESPONSES, heed_rank


class Client:
    """Stands in for AsyncLLM: what `generate` was asked for."""

    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            local_engines_only=True, data_parallel_size=4, data_parallel_size_local=2
        )
    )

    def generate(self, *, data_parallel_rank=None):
        return data_parallel_rank


def asked(client, path, *headers):
    app = SimpleNamespace(state=SimpleNamespace(engine_client=client))
    heed_rank({"headers": list(headers), "app": app}, path)
    return client.generate()


def test_a_request_started_within_another_one_has_no_rank_of_it():
    """As a server does with pipelined requests: in one context."""

    def pipelined():
        client = Client()
        assert asked(client, RESPONSES, (RANK_HEADER, b"1")) == 1
        assert asked(client, "/v1/chat/completions") is None
        assert asked(client, RESPONSES) is None

    contextvars.copy_context().run(pipelined)


def test_ranks_of_other_nodes_are_refused():
    app = SimpleNamespace(state=SimpleNamespace(engine_client=Client()))
    for rank, good in ((b"1", True), (b"2", False), (b"-1", False)):
        answer = heed_rank({"headers": [(RANK_HEADER, rank)], "app": app}, RESPONSES)
        assert (answer is None) is good
    assert answer["error"]["message"] == "data_parallel_rank -1 is out of range [0, 2)."


def ranked(app: object, path: str, *headers: dict[str, str]) -> list[int | None]:
    """Which ranks an engine client is told for requests one after the other."""
    told: list[int | None] = []

    async def generate(*, data_parallel_rank: int | None = None):
        told.append(data_parallel_rank)
        yield "output"

    async def respond(request: Request) -> StreamingResponse:
        own = request.query_params.get("own")
        named = {"data_parallel_rank": int(own)} if own else {}
        client = request.app.state.engine_client
        # As vLLM does: the answer begins before the engine is asked.
        return StreamingResponse(client.generate(**named))

    app.state.engine_client.generate = generate
    app.state.engine_client.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(local_engines_only=False, data_parallel_size=2)
    )
    app.router.routes.append(Route(path, respond, methods=["POST"]))
    for own in headers:
        answer = post(app, path + own.pop("query", ""), json={}, headers=own)
        assert answer.text
        if answer.status_code != 200:
            told.append(answer.status_code)
    return told


def test_the_rank_header_counts_for_responses():
    """vLLM reads it in all other generating paths; a client's own choice stays."""
    rank = {"X-Data-Parallel-Rank": "1"}
    told = ranked(
        application(),
        "/v1/responses",
        dict(rank),
        {},
        {"X-Data-Parallel-Rank": "0"},
        {"X-Data-Parallel-Rank": "x"},
        {**rank, "query": "?own=3"},
    )
    assert told == [1, None, 0, None, 3]


@pytest.mark.parametrize("rank", ["2", "-1", str(1 << 70)])
def test_a_rank_that_there_is_not_is_refused_as_vllm_does(rank):
    """Before the answer begins: an exception in a stream breaks the connection."""
    headers = {"X-Data-Parallel-Rank": rank}
    assert ranked(application(), "/v1/responses", dict(headers)) == [400]
    assert ranked(application(), "/v1/completions/x", dict(headers)) == [None]


def test_the_rank_header_is_vllms_own_business_elsewhere():
    rank = {"X-Data-Parallel-Rank": "1"}
    assert ranked(application(), "/v1/messages", rank) == [None]
