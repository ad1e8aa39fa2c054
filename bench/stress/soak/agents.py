"""Agents that loop over programs, some of which go away in the middle of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.serve.replay import ReplayOptions, new_token_ids
from bench.sim.load.programs import Program, Turn
from bench.stress.soak.requests import JUNK, STYLES, Requests, Tally, identify

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
    """All agents of a soak; they share one endless sequence of programs."""

    def __init__(
        self,
        requests: Requests,
        programs: Sequence[Program],
        options: AgentOptions,
        stop: asyncio.Event,
    ) -> None:
        self._requests = requests
        self._programs = programs
        self._options = options
        self._tokens = ReplayOptions(seed=options.seed)
        self._stop = stop
        self._serials = itertools.count()

    @property
    def tally(self) -> Tally:
        """What the agents saw so far."""
        return self._requests.tally

    async def run(self) -> None:
        """Until `stop` is set; turns under way are finished first."""
        async with asyncio.TaskGroup() as tasks:
            for index in range(self._options.agents):
                tasks.create_task(self._agent(index))

    async def prepare(self) -> None:
        """Each malformed hint and one abort, so that every metric has its labels."""
        prompt = self._new_tokens("prepare", 40)
        for junk in JUNK:
            body = self._requests.body(prompt, 2)
            body["kv_transfer_params"] = {"ttlcache": junk}
            await self._requests.turn(body, {})
        doomed = self._requests.body(prompt, ABORT_EXTRA_TOKENS)
        await self._requests.abort(doomed, {}, chunks=2, within_s=10.0)
        tally = self.tally
        self._requests.tally = Tally(failed=tally.failed, reasons=tally.reasons)

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
            prompt += self._new_tokens(
                f"shared-{serial % _SHARED_PROMPTS}", SHARED_TOKENS
            )
        for index, turn in enumerate(program.turns):
            if self._stop.is_set():
                return True
            prompt += new_token_ids(own_id, index, turn, self._tokens)
            params, headers = identify(
                style, own_id, turn, last=index == len(program.turns) - 1
            )
            if rng.random() < self._options.junk_share:
                self.tally.junk_hints += 1
                params = {"ttlcache": rng.choice(JUNK)}
            extra = {"kv_transfer_params": params} if params else {}
            if rng.random() < self._options.abort_share:
                await self._abort(prompt, turn, extra, headers, rng)
                if rng.random() < self._options.leave_share:
                    self.tally.left += 1
                    return True
            body = self._requests.body(prompt, turn.output_tokens) | extra
            answer = await self._requests.turn(body, headers)
            if answer is None:
                return False
            prompt += answer
            await self._pause(turn.gap_s)
        self.tally.programs += 1
        return True

    async def _abort(
        self,
        prompt: list[int],
        turn: Turn,
        extra: dict[str, Any],
        headers: dict[str, str],
        rng: random.Random,
    ) -> None:
        body = self._requests.body(prompt, turn.output_tokens + ABORT_EXTRA_TOKENS)
        chunks = rng.randrange(1, _MAX_ABORT_CHUNKS)
        within_s = rng.uniform(0.02, _MAX_ABORT_S)
        await self._requests.abort(body | extra, headers, chunks, within_s)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not beyond `stop`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    def _new_tokens(self, name: str, count: int) -> list[int]:
        turn = Turn(count, 0, "", 0.0)
        return new_token_ids(name, 0, turn, self._tokens)
