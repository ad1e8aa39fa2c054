"""The same agents and clients as in `play`, against a real server."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import httpx

from bench.serve.server import VLLMServer
from bench.stress.abuse.patterns import Pattern, Sent
from bench.stress.abuse.play import Waits
from ttlcache.clock import stopwatch_s

#: Of the tiny model; ids below `FIRST_TOKEN` are special.
FIRST_TOKEN, VOCAB = 5, 2_048
#: A head start of the clients: the server is full when the first agent comes.
WARM_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Agents that behave. Tokens are KV tokens, times seconds."""

    agents: int = 4
    turns: int = 6
    new_tokens: int = 150
    output_tokens: int = 16
    gap_s: float = 0.5
    agents_every_s: float = 1.0


def play_on(server: VLLMServer, pattern: Pattern, load: ServerLoad) -> Waits:
    """What the agents of `load` wait beside the clients of a pattern.

    `Waits.waits_s` are seconds from a turn's arrival to its answer.
    """
    return asyncio.run(_Play(server, pattern, load).run())


@dataclass(slots=True)
class _Play:
    server: VLLMServer
    pattern: Pattern
    load: ServerLoad
    jcts_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    contexts: list[list[int]] = field(default_factory=list)

    async def run(self) -> Waits:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.server.base_url, timeout=600.0, limits=limits
        ) as http:
            clients = [
                asyncio.create_task(self._client(http, number))
                for number in range(self.pattern.clients)
            ]
            await asyncio.sleep(WARM_UP_S)
            agents = (self._agent(http, number) for number in range(self.load.agents))
            await asyncio.gather(*agents)
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        return Waits(tuple(self.jcts_s), tuple(self.waits_s))

    async def _client(self, http: httpx.AsyncClient, client: int) -> None:
        context: list[int] = []
        number = 0
        while self.pattern.repeats or not number:
            known = self.pattern.request(client, number, context, lambda: self.contexts)
            context = await _send(http, known)
            number += 1

    async def _agent(self, http: httpx.AsyncClient, number: int) -> None:
        load, rng = self.load, random.Random(number)
        await asyncio.sleep(number * load.agents_every_s)
        began_s, context = stopwatch_s(), list[int]()
        for turn in range(load.turns):
            new = (rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(load.new_tokens))
            context = [*context, *new]
            is_last = turn == load.turns - 1
            hints = {"program_id": f"agent-{number}", "tool": "bash"}
            sent = Sent(
                context, hints | {"is_last_step": is_last}, None, load.output_tokens
            )
            sent_s = stopwatch_s()
            context = await _send(http, sent)
            self.waits_s.append(stopwatch_s() - sent_s)
            self.contexts.append(context)
            if not is_last:
                await asyncio.sleep(load.gap_s)
        self.jcts_s.append(stopwatch_s() - began_s)


async def _send(http: httpx.AsyncClient, sent: Sent) -> list[int]:
    """Prompt and output, as the server has them."""
    prompt = [_known(token) for token in sent.prompt]
    body: dict[str, object] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": sent.max_tokens,
        "min_tokens": sent.max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    if sent.hints is not None:
        body["kv_transfer_params"] = {"ttlcache": dict(sent.hints)}
    if sent.session_id is not None:
        body["session_id"] = sent.session_id
    response = await http.post("/v1/completions", json=body)
    response.raise_for_status()
    return [*prompt, *response.json()["choices"][0]["token_ids"]]


def _known(token: int) -> int:
    """A pattern's token, as one of the model's; those of contexts are already."""
    return token if token < VOCAB else FIRST_TOKEN + token % (VOCAB - FIRST_TOKEN)
