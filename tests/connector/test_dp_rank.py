"""The rank that a `/v1/responses` request names is that request's only."""

from __future__ import annotations

import contextvars
from types import SimpleNamespace

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


def test_what_is_no_number_and_what_the_caller_says_stay():
    def requests():
        client = Client()
        assert asked(client, RESPONSES, (RANK_HEADER, b"x")) is None
        assert asked(client, RESPONSES, (RANK_HEADER, b"1")) == 1
        assert client.generate(data_parallel_rank=0) == 0

    contextvars.copy_context().run(requests)


def test_ranks_of_other_nodes_are_refused():
    app = SimpleNamespace(state=SimpleNamespace(engine_client=Client()))
    for rank, good in ((b"1", True), (b"2", False), (b"-1", False)):
        answer = heed_rank({"headers": [(RANK_HEADER, rank)], "app": app}, RESPONSES)
        assert (answer is None) is good
    assert answer["error"]["message"] == "data_parallel_rank -1 is out of range [0, 2)."
