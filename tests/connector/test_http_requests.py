"""What the middleware changes in a request: its billing header, its rank."""

from __future__ import annotations

import contextvars
import json
from types import SimpleNamespace

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tests.connector.test_middleware import CHAT, application, post
from ttlcache_connector.http.billing_header import without_billing_header
from ttlcache_connector.http.dp_rank import RANK_HEADER, RESPONSES, heed_rank

HEADER = (
    "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;"
)
NAME = b"x-anthropic-billing-header"
SYSTEM = "You are an agent."
USER = {"role": "user", "content": f"{HEADER}\nWhat is this?"}


def text(value: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": value, **more}


def stripped(**fields: object) -> object:
    out = without_billing_header(json.dumps(fields).encode())
    return None if out is None else json.loads(out)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{HEADER}\n{SYSTEM}", SYSTEM),
        (f"{HEADER}{SYSTEM}", SYSTEM),
        (HEADER, ""),
        (HEADER.removesuffix(";"), ""),
        ([text(HEADER), text(SYSTEM, kept={})], [text(SYSTEM, kept={})]),
        ([text(f"{HEADER}\n{SYSTEM}")], [text(SYSTEM)]),
        ([text(HEADER)], ""),
    ],
)
def test_in_every_form_of_system_text(before, after):
    found = stripped(system=before, messages=[USER])
    assert found == {"system": after, "messages": [USER]}
    assert stripped(instructions=before) == {"instructions": after}
    for role in ("system", "developer"):
        for name in ("messages", "input"):
            turns = [{"role": role, "content": before, "name": "x"}, USER]
            expected = [{"role": role, "content": after, "name": "x"}, USER]
            assert stripped(**{name: turns}) == {name: expected}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER]},
        {"prompt": HEADER},
        {"system": f"Text first. {HEADER}"},
        {"system": "x-anthropic-billing-header is a header."},
        {"system": {"text": HEADER}, "messages": {"role": HEADER}},
        {"system": [HEADER, 5, None, {"text": 5}], "input": HEADER},
        {"messages": [{"role": "system", "content": None}, {"content": HEADER}, USER]},
        {"messages": [{"role": "system", "content": []}, {"role": "system"}, USER]},
    ],
)
def test_what_is_no_header_before_system_text_stays(fields):
    assert stripped(**fields) is None


@pytest.mark.parametrize(
    "body",
    [
        NAME,
        b'{"system": "%s: a=1;' % NAME,
        b'["%s: a=1;"]' % NAME,
        b'{"messages": [5, "%s: a=1;"]}' % NAME,
        b'{"system": %s"%s: a=1;"' % (b"[" * 5000, NAME),
        b'{"system": %s"%s: a=1;"%s}' % (b"[" * 5000, NAME, b"]" * 5000),
    ],
)
def test_broken_bodies_stay_as_they_are(body):
    assert without_billing_header(body) is None


def test_a_long_false_header_takes_no_time():
    value = "x-anthropic-billing-header:" + " a=b" * 200_000
    assert stripped(system=value) is None


def test_other_members_keep_their_bytes():
    body = (
        '{"n": 1.10, "system": "%s\\nX", "e": "\\u00e9", "big": 123456789012345678901}'
    )
    out = without_billing_header((body % HEADER).encode())
    assert out == b'{"n":1.10,"system":"X","e":"\\u00e9","big":123456789012345678901}'


def test_the_middleware_sends_the_body_on_without_it():
    messages = [{"role": "system", "content": f"{HEADER}\n{SYSTEM}"}, USER]
    answer = post(application(), CHAT, json={"messages": messages}).json()
    sent = json.loads(answer["body"])
    assert sent == {"messages": [{"role": "system", "content": SYSTEM}, USER]}
    assert int(answer["length"]) == answer["bytes"] == len(answer["body"])


def test_a_users_programs_stay_one_while_the_header_changes():
    sessions = set()
    for number in range(3):
        header = HEADER.replace("eb6c6", f"{number:05d}")
        turns = [{"role": "system", "content": header + SYSTEM}, USER]
        answer = post(application(), CHAT, json={"messages": turns, "user": "u"}).json()
        sessions.add(answer["session"])
    assert len(sessions) == 1
    assert None not in sessions


# --- the rank that a `/v1/responses` request names is that request's only


class Client:
    """Stands in for AsyncLLM: what `generate` was asked for."""

    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            local_engines_only=True, data_parallel_size=4, data_parallel_size_local=2
        )
    )

    def generate(self, *, data_parallel_rank=None):
        return data_parallel_rank


def scope_with(client, *headers):
    app = SimpleNamespace(state=SimpleNamespace(engine_client=client))
    return {"headers": list(headers), "app": app}


def test_a_request_started_within_another_one_has_no_rank_of_it():
    """As a server does with pipelined requests: in one context."""
    client = Client()

    def asked(path, *headers):
        heed_rank(scope_with(client, *headers), path)
        return client.generate()

    def pipelined():
        assert asked(RESPONSES, (RANK_HEADER, b"1")) == 1
        assert asked("/v1/chat/completions") is None
        assert asked(RESPONSES) is None

    contextvars.copy_context().run(pipelined)


def test_ranks_of_other_nodes_are_refused():
    for rank, good in ((b"1", True), (b"2", False), (b"-1", False)):
        answer = heed_rank(scope_with(Client(), (RANK_HEADER, rank)), RESPONSES)
        assert (answer is None) is good
    assert answer["error"]["message"] == "data_parallel_rank -1 is out of range [0, 2)."


def ranked(path: str, *headers: dict[str, str]) -> list[int | None]:
    """Which ranks an engine client is told for requests one after the other."""
    app, told = application(), []

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
    one, other, wrong = ({"X-Data-Parallel-Rank": rank} for rank in ("1", "0", "x"))
    told = ranked(RESPONSES, {**one}, {}, other, wrong, {**one, "query": "?own=3"})
    assert told == [1, None, 0, None, 3]
    assert ranked("/v1/messages", one) == [None]


@pytest.mark.parametrize("rank", ["2", "-1", str(1 << 70)])
def test_a_rank_that_there_is_not_is_refused_as_vllm_does(rank):
    """Before the answer begins: an exception in a stream breaks the connection."""
    headers = {"X-Data-Parallel-Rank": rank}
    assert ranked(RESPONSES, {**headers}) == [400]
    assert ranked("/v1/completions/x", {**headers}) == [None]
