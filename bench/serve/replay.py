"""Replays programs over HTTP against a server with vLLM's completions API.

Each program is its own task: request, real sleep for the tool, next request with
``previous prompt + real output token ids + new token ids``.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from bench.serve.tiny_model import DEFAULT_SHAPE
from ttlcache_sim.load.programs import Program, Turn
from ttlcache_sim.metrics import TurnRecord

#: Token ids below this are the tokenizer's special tokens.
FIRST_TOKEN_ID = 5
_REQUEST_TIMEOUT_S = 900.0
_MAX_BACKOFF_S = 8.0


class RequestFailed(RuntimeError):
    """A turn that was not answered as asked."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed turn; its program stops there."""

    program_id: str
    turn: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How requests are made."""

    seed: int = 0
    """Seed of the new token ids of each program and turn."""
    hints: bool = True
    """Send program id, tool and last step in ``kv_transfer_params``."""
    session_header: bool = False
    """Send the program id as ``X-Session-ID``, too."""
    at_once: int | None = None
    """Most programs in progress; one that arrives meanwhile starts later."""
    retries: int = 0
    """How often a failed request is sent again, as agents' HTTP clients do."""
    cache_salt: str | None = None
    """Tenant of all programs."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Completed turns, failed ones, and attempts that were made again."""

    records: tuple[TurnRecord, ...]
    failures: tuple[Failure, ...]
    retried: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion; times are seconds since `start_s`."""

    output_token_ids: tuple[int, ...]
    first_logprob: float
    first_token_s: float
    departure_s: float
    prompt_tokens: int
    cached_tokens: int
    queue_s: float
    server: str


def replay(
    base_url: str,
    programs: Sequence[Program],
    options: ReplayOptions,
    on_turn: Callable[[TurnRecord], None] | None = None,
) -> ReplayResult:
    """Replay all programs and return when the last one has ended.

    Args:
        base_url: the server, e.g. ``http://127.0.0.1:8000``.
        programs: what to replay; arrivals count from the call.
        options: how requests are made.
        on_turn: called after every completed turn, e.g. for a progress bar.
    """

    async def run() -> ReplayResult:
        async with connect(base_url) as client:
            return await replay_with(client, programs, options, on_turn)

    return asyncio.run(run())


def connect(base_url: str) -> httpx.AsyncClient:
    """A client for as many requests at a time as there are."""
    # A kept connection may be closed by the server just as a gap ends.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(
        base_url=base_url, limits=limits, timeout=_REQUEST_TIMEOUT_S
    )


async def replay_with(
    client: httpx.AsyncClient,
    programs: Sequence[Program],
    options: ReplayOptions,
    on_turn: Callable[[TurnRecord], None] | None = None,
) -> ReplayResult:
    """:func:`replay` on a given client."""
    records: list[TurnRecord] = []
    failures: list[Failure] = []
    retried: list[Failure] = []
    start_s = time.monotonic()

    async def ask(program: Program, index: int, prompt: list[int]) -> Answer | None:
        body = _body(program, index, prompt, options)
        headers = {"X-Session-ID": program.program_id} if options.session_header else {}
        for attempt in range(options.retries + 1):
            try:
                return await complete(client, body, headers, start_s)
            except (RequestFailed, httpx.HTTPError) as error:
                reason = f"{type(error).__name__}: {error}"
                failure = Failure(program.program_id, index, reason)
            if attempt < options.retries:
                retried.append(failure)
                await asyncio.sleep(min(0.5 * 2**attempt, _MAX_BACKOFF_S))
        failures.append(failure)
        return None

    seats = asyncio.Semaphore(options.at_once or max(1, len(programs)))

    async def run(program: Program) -> None:
        await asyncio.sleep(program.arrival_s)
        async with seats:
            await work(program)

    async def work(program: Program) -> None:
        prompt: list[int] = []
        for index, turn in enumerate(program.turns):
            prompt += new_token_ids(program.program_id, index, turn, options)
            arrival_s = time.monotonic() - start_s
            answer = await ask(program, index, prompt)
            if answer is None:
                return
            records.append(_record(program, index, arrival_s, answer))
            if on_turn is not None:
                on_turn(records[-1])
            prompt += answer.output_token_ids
            if turn.gap_s > 0:
                await asyncio.sleep(turn.gap_s)

    async with asyncio.TaskGroup() as tasks:
        for program in programs:
            tasks.create_task(run(program))
    return ReplayResult(tuple(records), tuple(failures), tuple(retried))


def new_token_ids(
    program_id: str, index: int, turn: Turn, options: ReplayOptions
) -> list[int]:
    """The turn's new prompt tokens: random, the same in every arm."""
    rng = random.Random(f"{options.seed}/{program_id}/{index}")
    return [
        rng.randrange(FIRST_TOKEN_ID, DEFAULT_SHAPE.vocab)
        for _ in range(turn.new_prompt_tokens)
    ]


def _body(
    program: Program, index: int, prompt: list[int], options: ReplayOptions
) -> dict[str, Any]:
    turn = program.turns[index]
    body = streamed(prompt, turn.output_tokens) | {"logprobs": 0}
    if options.cache_salt is not None:
        body["cache_salt"] = options.cache_salt
    if options.hints:
        hint: dict[str, Any] = {
            "program_id": program.program_id,
            "is_last_step": index == len(program.turns) - 1,
        }
        if turn.tool:
            hint["tool"] = turn.tool
        body["kv_transfer_params"] = {"ttlcache": hint}
    return body


def streamed(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """The body of a streamed greedy completion of exactly `num_tokens` tokens."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "min_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def complete(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    headers: dict[str, str],
    start_s: float = 0.0,
) -> Answer:
    """One completion of a `streamed` body.

    Raises:
        RequestFailed: it has not exactly the tokens asked for.
        httpx.HTTPError: no answer.
    """
    token_ids: list[int] = []
    first_logprob = first_token_s = departure_s = math.nan
    usage: dict[str, Any] = {}
    timing: dict[str, Any] = {}
    server = ""
    async with streaming(client, body, headers) as chunks:
        async for chunk in chunks:
            usage = chunk.get("usage") or usage
            timing = chunk.get("metrics") or timing
            server = chunk.get("model") or server
            for choice in chunk["choices"]:
                now_s = time.monotonic() - start_s
                if choice.get("token_ids"):
                    if not token_ids:
                        first_token_s = now_s
                        if choice.get("logprobs"):
                            first_logprob = choice["logprobs"]["token_logprobs"][0]
                    token_ids += choice["token_ids"]
                    departure_s = now_s
    if len(token_ids) != (expected := body["max_tokens"]):
        raise RequestFailed(f"{len(token_ids)} output tokens, expected {expected}")
    details = usage.get("prompt_tokens_details")
    if details is None or timing.get("queue_time_ms") is None:
        raise RequestFailed(
            "no cached tokens or queue time in the usage: start the server with "
            "--enable-prompt-tokens-details --enable-per-request-metrics"
        )
    return Answer(
        tuple(token_ids),
        first_logprob,
        first_token_s,
        departure_s,
        usage["prompt_tokens"],
        details.get("cached_tokens") or 0,
        timing["queue_time_ms"] / 1000.0,
        server,
    )


@asynccontextmanager
async def streaming(
    client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The chunks of a completion; leaving early aborts it."""
    async with client.stream(
        "POST", "/v1/completions", json=body, headers=headers
    ) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise RequestFailed(f"HTTP {response.status_code}: {text[:500]}")
        async with aclosing(_chunks(response)) as chunks:
            yield chunks


async def _chunks(response: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    """JSON payloads of a server-sent event stream, up to ``[DONE]``.

    Not by `aiter_lines`, which ends a line at U+0085 or U+2028, too: a model may put
    out any text.
    """
    async for line in _lines(response):
        payload = line.removeprefix(b"data: ")
        if payload == b"[DONE]":
            return
        if payload != line:
            chunk = json.loads(payload)
            if "error" in chunk:
                raise RequestFailed(f"error in the stream: {chunk['error']}")
            yield chunk
    raise RequestFailed("the stream ended without [DONE]")


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


def _record(
    program: Program, index: int, arrival_s: float, answer: Answer
) -> TurnRecord:
    turn = program.turns[index]
    return TurnRecord(
        program_id=program.program_id,
        turn=index,
        arrival_s=arrival_s,
        tool=turn.tool,
        gap_s=turn.gap_s,
        **asdict(answer),
    )
