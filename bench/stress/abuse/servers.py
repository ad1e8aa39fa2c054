"""The same agents and clients as in `play`, against a real server."""

from __future__ import annotations

import asyncio

import httpx

from bench.serve.replay import (
    FIRST_TOKEN_ID,
    ReplayOptions,
    connect,
    replay_with,
    streamed,
)
from bench.serve.server import VLLMServer
from bench.serve.tiny_model import DEFAULT_SHAPE
from bench.stress.abuse.patterns import Asked, Pattern, Sent
from bench.stress.abuse.play import Waits
from ttlcache_sim.load.programs import Program, Turn
from ttlcache_sim.metrics import jct_s

#: A head start of the clients: the server is full when the first agent comes.
WARM_UP_S = 5.0
#: Agents that behave: one a second.
_TURN = Turn(new_prompt_tokens=150, output_tokens=16, tool="bash", gap_s=0.5)
AGENTS = [Program(f"agent-{n}", WARM_UP_S + n, (_TURN,) * 6) for n in range(4)]


def play_on(server: VLLMServer, pattern: Pattern) -> Waits:
    """What the agents wait beside the clients of a pattern, who know no contexts.

    `Waits.waits_s` are seconds from a turn's arrival to its answer.

    Raises:
        RuntimeError: a turn of an agent failed.
    """
    return asyncio.run(_play(server, pattern))


async def _play(server: VLLMServer, pattern: Pattern) -> Waits:
    async with connect(server.base_url) as http:
        clients = [
            asyncio.create_task(_client(http, pattern, number))
            for number in range(pattern.clients)
        ]
        result = await replay_with(http, AGENTS, ReplayOptions())
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    if result.failures:
        raise RuntimeError(f"a turn failed: {result.failures[0]}")
    waits_s = tuple(turn.departure_s - turn.arrival_s for turn in result.records)
    return Waits(tuple(jct_s(result.records).values()), waits_s)


async def _client(http: httpx.AsyncClient, pattern: Pattern, client: int) -> None:
    context: list[int] = []
    number = 0
    while pattern.repeats or not number:
        asked = Asked(client, number, context, list)
        context = await _send(http, pattern.request(asked))
        number += 1


async def _send(http: httpx.AsyncClient, sent: Sent) -> list[int]:
    """Prompt and output, as the server has them."""
    prompt = [_known(token) for token in sent.prompt]
    body = streamed(prompt, sent.max_tokens)
    body |= {"stream": False, "stream_options": None}
    if sent.hints is not None:
        body["kv_transfer_params"] = {"ttlcache": dict(sent.hints)}
    if sent.session_id is not None:
        body["session_id"] = sent.session_id
    response = await http.post("/v1/completions", json=body)
    response.raise_for_status()
    return [*prompt, *response.json()["choices"][0]["token_ids"]]


def _known(token: int) -> int:
    """A pattern's token, as one of the model's; those of contexts are already."""
    vocab = DEFAULT_SHAPE.vocab
    is_known = token < vocab
    return token if is_known else FIRST_TOKEN_ID + token % (vocab - FIRST_TOKEN_ID)
