"""The soak's requests: answered ones, aborted ones, and ways to name a program."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.serve.replay import RequestFailed
from bench.sim.workloads import Turn

#: How a program says who it is; "prefix" says nothing.
STYLES = ("hints", "wishes", "continuum", "session", "prefix")
#: Values of `kv_transfer_params.ttlcache` that must cost retention and nothing else.
JUNK: tuple[object, ...] = (
    {"ttl": -5},
    {"tool_eta_s": "soon"},
    {"program_id": "x" * 10_000},
    {"program_id": {"a": [{"b": []}]}},
    {"program_id": ""},
    {"is_last_step": "maybe"},
    {"tool": [1, 2]},
    {"colour": "blue"},
    {"priority_class": 10**6},
    [1, [2, [3]]],
)
#: Failures kept as text; all are counted.
_MAX_REASONS = 20


@dataclass(slots=True)
class Tally:
    """What the agents saw."""

    answered: int = 0
    aborted: int = 0
    junk_hints: int = 0
    programs: int = 0
    """Programs that ran to their end."""
    left: int = 0
    """Programs abandoned after an abort."""
    styles: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    reasons: list[str] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    """Seconds each answered request waited for its first admission."""
    longest_service_s: float = 0.0
    """Longest time from a request's admission to its last token."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def fail(self, reason: str) -> None:
        """Count a request that should have been answered and was not."""
        self.failed += 1
        if len(self.reasons) < _MAX_REASONS:
            self.reasons.append(reason)


class Requests:
    """Sends turns and counts what came back in `tally`."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            client: with the server's address and a timeout.
            model: name under which the server serves it.
            on_turn: called after every answered turn.
        """
        self.tally = Tally()
        self._client = client
        self._model = model
        self._on_turn = on_turn

    async def turn(
        self, body: dict[str, Any], headers: dict[str, str]
    ) -> list[int] | None:
        """One answered turn's token ids; None, and a failure, otherwise."""
        try:
            answer = await self._answer(body, headers)
        except (RequestFailed, httpx.HTTPError, ValueError, KeyError) as error:
            self.tally.fail(f"{type(error).__name__}: {error}")
            return None
        self._on_turn()
        return answer

    async def _answer(self, body: dict[str, Any], headers: dict[str, str]) -> list[int]:
        token_ids: list[int] = []
        usage: dict[str, Any] = {}
        timing: dict[str, Any] = {}
        done = False
        sent_s = time.monotonic()
        async with self._stream(body, headers) as response:
            await _check(response)
            async for line in response.aiter_lines():
                payload = line.removeprefix("data: ")
                done = done or payload == "[DONE]"
                if payload == line or done:
                    continue
                chunk = json.loads(payload)
                if "error" in chunk:
                    raise RequestFailed(f"error in the stream: {chunk['error']}")
                usage = chunk.get("usage") or usage
                timing = chunk.get("metrics") or timing
                for choice in chunk["choices"]:
                    token_ids += choice.get("token_ids") or ()
        elapsed_s = time.monotonic() - sent_s
        if not done or len(token_ids) != body["max_tokens"]:
            raise RequestFailed(
                f"{len(token_ids)} tokens, expected {body['max_tokens']}; [DONE] "
                f"{'seen' if done else 'missing'}"
            )
        tally, wait_s = self.tally, timing["queue_time_ms"] / 1000.0
        tally.answered += 1
        tally.waits_s.append(wait_s)
        tally.longest_service_s = max(tally.longest_service_s, elapsed_s - wait_s)
        tally.prompt_tokens += usage["prompt_tokens"]
        tally.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"] or 0
        tally.output_tokens += len(token_ids)
        return token_ids

    async def abort(
        self,
        body: dict[str, Any],
        headers: dict[str, str],
        chunks: int,
        within_s: float,
    ) -> None:
        """Go away after some chunks, or after `within_s` seconds: perhaps queued."""
        self.tally.aborted += 1
        try:
            async with (
                asyncio.timeout(within_s),
                self._stream(body, headers) as response,
            ):
                await _check(response)
                seen = 0
                async for line in response.aiter_lines():
                    seen += line.startswith("data: ")
                    if seen >= chunks:
                        return
        except TimeoutError:
            return
        except (RequestFailed, httpx.HTTPError) as error:
            self.tally.fail(f"before its abort: {type(error).__name__}: {error}")

    def _stream(
        self, body: dict[str, Any], headers: dict[str, str]
    ) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        return self._client.stream(
            "POST", "/v1/completions", json=body, headers=headers
        )

    def body(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """A streamed greedy completion of exactly `num_tokens` tokens."""
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "min_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def identify(
    style: str, own_id: str, turn: Turn, last: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """`kv_transfer_params` and headers by which a turn of this style is known."""
    if style == "session":
        return {}, {"X-Session-ID": own_id}
    if style == "prefix":
        return {}, {}
    if style == "continuum":
        flat: dict[str, Any] = {"job_id": own_id, "is_last_step": last}
        return flat | ({"this_func_call": turn.tool} if turn.tool else {}), {}
    hint: dict[str, Any] = {"program_id": own_id, "is_last_step": last}
    if turn.tool:
        hint["tool"] = turn.tool
    if style == "wishes" and not last:
        hint |= {"ttl": "5m", "tool_eta_s": turn.gap_s, "priority_class": 1}
    return {"ttlcache": hint}, {}


async def _check(response: httpx.Response) -> None:
    if response.status_code != 200:
        text = (await response.aread()).decode(errors="replace")
        raise RequestFailed(f"HTTP {response.status_code}: {text[:300]}")
