"""Programs as vLLM requests: token ids and block hashes by construction.

A program's context only grows, and all its private tokens are one number of its
own, so equal contexts have equal tokens and different ones differ. The hash of a
block is then a function of (program, index) and needs no token: prefix caching sees
what it would see with SHA-256 over real tokens, at a hundredth of the time. What all
programs begin with, as a system prompt, is nobody's: token 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from ttlcache_sim.load.programs import Program, Turn

#: A block hash is its program's token and its index in the context.
OWNER_BYTES = 12
_INDEX_BYTES, _INDEX_BITS = 4, 20


@dataclass(slots=True)
class Agent:
    """A program under way: the turn it is at, its context, its hashes.

    context_tokens: before this turn's prompt. start_s: when this turn was sent;
    come_s: when it came to the engine.
    service_s: how long the engine worked on the last finished turn, wait excluded.
    """

    index: int
    program: Program
    turn: int = 0
    context_tokens: int = 0
    start_s: float = 0.0
    come_s: float = 0.0
    service_s: float = 0.0
    hashes: list[BlockHash] = field(default_factory=list)

    @property
    def program_id(self) -> str:
        return self.program.program_id

    @property
    def token(self) -> int:
        return self.index + 1

    @property
    def current(self) -> Turn:
        return self.program.turns[self.turn]

    @property
    def is_last(self) -> bool:
        return self.turn == len(self.program.turns) - 1

    @property
    def prompt_tokens(self) -> int:
        return self.context_tokens + self.current.new_prompt_tokens

    def remaining_tokens(self) -> tuple[int, int]:
        """New prompt and output tokens of this turn and all after it."""
        left = self.program.turns[self.turn :]
        prompt = sum(turn.new_prompt_tokens for turn in left)
        return prompt, sum(turn.output_tokens for turn in left)


@dataclass(slots=True)
class InFlight:
    """An agent's current turn inside the engine; times once they are known."""

    agent: Agent
    request: Request
    scheduled_s: float | None = None
    first_token_s: float | None = None
    cached_tokens: int = 0


class RequestFactory:
    """Builds the request of an agent's current turn."""

    def __init__(
        self,
        block_tokens: int,
        *,
        tell_last: bool = True,
        tell_gap: bool = False,
        repeat_output: bool = True,
        shared_tokens: int = 0,
        priority: Callable[[Agent], int] | None = None,
    ) -> None:
        """
        Args:
            tell_last: the client says which turn is the last one.
            repeat_output: a prompt holds what the model put out before; else another
                text of that length, as where reasoning is dropped, or a log replayed.
            shared_tokens: at the head of first prompts, the same in all of them.
            tell_gap: it also says how long the coming gap will be (oracle only).
            priority: vLLM's request priority, smaller first (oracle only).
        """
        self._priority = priority
        self._block_tokens = block_tokens
        self._tell_last = tell_last
        self._tell_gap = tell_gap
        self._repeat_output = repeat_output
        self._shared_blocks = shared_tokens // block_tokens

    def build(self, agent: Agent, arrival_s: float) -> Request:
        """The request, its `arrival_time` in virtual seconds."""
        output = agent.current.output_tokens
        if agent.turn and not self._repeat_output:
            put_out = agent.program.turns[agent.turn - 1].output_tokens
            repeated = agent.context_tokens - put_out
            del agent.hashes[repeated // self._block_tokens :]
        params = SamplingParams(
            max_tokens=output,
            min_tokens=output,
            ignore_eos=True,
            temperature=0,
            extra_args={"kv_transfer_params": {"ttlcache": self._hints(agent)}},
        )
        shared_tokens = self._shared_blocks_of(agent) * self._block_tokens
        own_tokens = agent.prompt_tokens - shared_tokens
        return Request(
            request_id=f"{agent.program_id}/{agent.turn}",
            prompt_token_ids=[0] * shared_tokens + [agent.token] * own_tokens,
            sampling_params=params,
            pooling_params=None,
            arrival_time=arrival_s,
            priority=self._priority(agent) if self._priority is not None else 0,
            block_hasher=lambda request: self._new_hashes(agent, request),
        )

    def _hints(self, agent: Agent) -> Mapping[str, Any]:
        hints: dict[str, Any] = {"program_id": agent.program_id}
        if agent.is_last:
            if self._tell_last:
                return {**hints, "is_last_step": True}
            return {**hints, "tool": "finish"}  # as an output without a tool call
        hints["tool"] = agent.current.tool.split("+")
        if self._tell_gap:
            hints["tool_eta_s"] = agent.current.gap_s
        return hints

    def _shared_blocks_of(self, agent: Agent) -> int:
        first, block_tokens = agent.program.turns[0], self._block_tokens
        shared = max(self._shared_blocks, first.shared_tokens // block_tokens)
        return min(shared, first.new_prompt_tokens // block_tokens)

    def _new_hashes(self, agent: Agent, request: Request) -> list[BlockHash]:
        start = len(request.block_hashes)
        stop = request.num_tokens // self._block_tokens
        shared = self._shared_blocks_of(agent)
        for index in range(len(agent.hashes), stop):
            is_shared = index < shared
            is_same = self._repeat_output or is_shared
            text = 0 if is_same else agent.turn << _INDEX_BITS
            owner = 0 if is_shared else agent.token
            block_hash = owner.to_bytes(OWNER_BYTES, "big")
            block_hash += (text + index).to_bytes(_INDEX_BYTES, "big")
            agent.hashes.append(BlockHash(block_hash))
        return agent.hashes[start:stop]
