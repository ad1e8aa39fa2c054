"""What happened in a cell, and its numbers.

Turn-level metrics are `ttlcache_sim.metrics`' own; this adds what only the engine sees.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm.v1.request import Request

from ttlcache_sim.load.agents import Agent
from ttlcache_sim.metrics import TurnRecord, summarize


class Recorder:
    """Collects turns and steps; times are virtual seconds.

    prefill_s: seconds that steps took longer for having prompt tokens in them.
    pinned_block_s: blocks referenced by pins, integrated over time.
    rollout_steps: batches of a rollout loop that are done.
    """

    def __init__(self) -> None:
        self.turns: list[TurnRecord] = []
        self.steps = 0
        self.empty_steps = 0
        self.busy_s = 0.0
        self.prefill_s = 0.0
        self.pinned_block_s = 0.0
        self.preemptions = 0
        self.rollout_steps = 0

    def step(self, seconds: float, prefill_s: float, pinned_blocks: int) -> None:
        self.steps += 1
        self.busy_s += seconds
        self.prefill_s += prefill_s
        self.pinned_block_s += seconds * pinned_blocks

    def idle(self, seconds: float, pinned_blocks: int) -> None:
        """The engine does not step: what is pinned stays."""
        self.pinned_block_s += seconds * pinned_blocks

    def turn(
        self,
        agent: Agent,
        request: Request,
        *,
        first_token_s: float,
        departure_s: float,
        scheduled_s: float,
        cached_tokens: int,
    ) -> None:
        self.preemptions += request.num_preemptions
        self.turns.append(
            TurnRecord(
                program_id=agent.program_id,
                turn=agent.turn,
                arrival_s=agent.start_s,
                first_token_s=first_token_s,
                departure_s=departure_s,
                queue_s=scheduled_s - agent.come_s,
                prompt_tokens=request.num_prompt_tokens,
                cached_tokens=cached_tokens,
                output_token_ids=tuple(request.output_token_ids),
                first_logprob=0.0,
                tool=agent.current.tool,
                gap_s=agent.current.gap_s,
            )
        )

    def metrics(self, block_bytes: int) -> dict[str, Any]:
        """Numbers of a cell."""
        result: dict[str, Any] = asdict(summarize(self.turns))
        result |= {
            "steps": self.steps,
            "empty_steps": self.empty_steps,
            "busy_s": self.busy_s,
            "prefill_s": self.prefill_s,
            "pinned_block_s": self.pinned_block_s,
            "pinned_byte_s": self.pinned_block_s * block_bytes,
            "preemptions": self.preemptions,
        }
        if self.rollout_steps:
            per_s = self.rollout_steps / result["makespan_s"]
            result["rollout_steps"] = self.rollout_steps
            result["rollout_steps_per_min"] = 60.0 * per_s
        return result
