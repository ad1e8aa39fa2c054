"""The soak's requests: answered ones, aborted ones, and ways to name a program."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.serve.replay import RequestFailed, complete, streamed
from bench.sim.load.programs import Turn

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
        sent_s = time.monotonic()
        answer = await complete(self._client, body, headers, sent_s)
        tally, service_s = self.tally, answer.departure_s - answer.queue_s
        tally.answered += 1
        tally.waits_s.append(answer.queue_s)
        tally.longest_service_s = max(tally.longest_service_s, service_s)
        tally.prompt_tokens += answer.prompt_tokens
        tally.cached_tokens += answer.cached_tokens
        tally.output_tokens += len(answer.output_token_ids)
        return list(answer.output_token_ids)

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
        return streamed(self._model, prompt, num_tokens)


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
