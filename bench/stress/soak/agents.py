"""Agents that loop over programs, some of which go away in the middle of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from bench.serve.replay import (
    ReplayOptions,
    RequestFailed,
    complete,
    new_token_ids,
    streamed,
    streaming,
)
from bench.stress.soak.requests import JUNK, STYLES, Tally, identify
from ttlcache_sim.load.programs import Program, Turn

#: Tokens of the system prompt that half of the programs share with others.
SHARED_TOKENS = 96
#: An aborted turn asks for this many tokens more than it would have read.
ABORT_EXTRA_TOKENS = 150
_SHARED_PROMPTS = 3
_MAX_ABORT_CHUNKS = 12
_MAX_ABORT_S = 4.0
_BACK_OFF_S = 1.0


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """How the agents behave; shares are probabilities per turn."""

    agents: int
    seed: int = 0
    abort_share: float = 0.08
    leave_share: float = 0.5
    """Of the aborts: those whose program never comes back."""
    junk_share: float = 0.03
    ramp_s: float = 5.0
    """The agents start within this many seconds."""


class Fleet:
    """All agents of a soak; they share one endless sequence of programs.

    Args:
        client: with the server's address and a timeout.
        stop: once it is set, turns under way are finished and no other is begun.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        programs: Sequence[Program],
        options: AgentOptions,
        stop: asyncio.Event,
    ) -> None:
        self.tally = Tally()
        self._client = client
        self._programs = programs
        self._options = options
        self._tokens = ReplayOptions(seed=options.seed)
        self._stop = stop
        self._serials = itertools.count()

    async def run(self) -> None:
        """Until `stop` is set."""
        async with asyncio.TaskGroup() as tasks:
            for index in range(self._options.agents):
                tasks.create_task(self._agent(index))

    async def prepare(self) -> None:
        """Each malformed hint and one abort, so that every metric has its labels."""
        prompt = self._new_tokens("prepare", 40)
        for junk in JUNK:
            body = streamed(prompt, 2) | {"kv_transfer_params": {"ttlcache": junk}}
            await self._turn(body, {})
        await self._abort(streamed(prompt, ABORT_EXTRA_TOKENS), {}, 2, 10.0)
        self.tally = Tally(failed=self.tally.failed, reasons=self.tally.reasons)

    async def _agent(self, index: int) -> None:
        rng = random.Random(f"{self._options.seed}/agent/{index}")
        await self._pause(rng.uniform(0.0, self._options.ramp_s))
        while not self._stop.is_set():
            if not await self._program(next(self._serials), rng):
                await self._pause(_BACK_OFF_S)

    async def _program(self, serial: int, rng: random.Random) -> bool:
        """One program; False when a request of it failed."""
        program = self._programs[serial % len(self._programs)]
        own_id = f"soak-{serial}"
        style = rng.choice(STYLES)
        styles = self.tally.styles
        styles[style] = styles.get(style, 0) + 1
        prompt: list[int] = []
        if rng.random() < 0.5:
            shared = f"shared-{serial % _SHARED_PROMPTS}"
            prompt += self._new_tokens(shared, SHARED_TOKENS)
        for index, turn in enumerate(program.turns):
            if self._stop.is_set():
                return True
            prompt += new_token_ids(own_id, index, turn, self._tokens)
            is_last = index == len(program.turns) - 1
            params, headers = identify(style, own_id, turn, is_last)
            if rng.random() < self._options.junk_share:
                self.tally.junk_hints += 1
                params = {"ttlcache": rng.choice(JUNK)}
            extra = {"kv_transfer_params": params} if params else {}
            if rng.random() < self._options.abort_share:
                doomed = streamed(prompt, turn.output_tokens + ABORT_EXTRA_TOKENS)
                chunks = rng.randrange(1, _MAX_ABORT_CHUNKS)
                within_s = rng.uniform(0.02, _MAX_ABORT_S)
                await self._abort(doomed | extra, headers, chunks, within_s)
                if rng.random() < self._options.leave_share:
                    self.tally.left += 1
                    return True
            body = streamed(prompt, turn.output_tokens) | extra
            output = await self._turn(body, headers)
            if output is None:
                return False
            prompt += output
            await self._pause(turn.gap_s)
        self.tally.programs += 1
        return True

    async def _turn(
        self, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[int, ...] | None:
        """One answered turn's token ids; None, and a failure, otherwise."""
        try:
            answer = await complete(self._client, body, headers, time.monotonic())
        except (RequestFailed, httpx.HTTPError, ValueError, KeyError) as error:
            self.tally.fail(f"{type(error).__name__}: {error}")
            return None
        self.tally.answer(answer)
        return answer.output_token_ids

    async def _abort(
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
                streaming(self._client, body, headers) as stream,
            ):
                for _ in range(chunks):
                    await anext(stream, None)
        except TimeoutError:
            return
        except (RequestFailed, httpx.HTTPError) as error:
            self.tally.fail(f"before its abort: {type(error).__name__}: {error}")

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not beyond `stop`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    def _new_tokens(self, name: str, count: int) -> list[int]:
        turn = Turn(count, 0, "", 0.0)
        return new_token_ids(name, 0, turn, self._tokens)
