"""The agents that are sent to every arm of a comparison, and the arms' servers.

The KV pool holds one or two programs while several are in progress, so vanilla vLLM
evicts a program's context while its tool runs and prefills it again afterwards; vLLM
with LMCache copies it to CPU memory and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command import Folders
from bench.serve.arms import Arm
from bench.serve.replay import ReplayOptions
from bench.serve.scaled import (
    SWE_BENCH,
    TraceScale,
    from_trace,
    longest_context,
    shuffled,
    synthetic,
)
from bench.serve.server import ServerOptions
from ttlcache.cli.command import option
from ttlcache_connector.lmcache_server.launch import TierOptions
from ttlcache_sim.load.programs import Program

#: The flag that turns ttlcache on, as the README gives it.
CONNECTOR: Mapping[str, Any] = {"kv_connector": "TTLConnector", "kv_role": "kv_both"}
#: What turns LMCache on without ttlcache; its server's address comes with the arm.
LMCACHE: Mapping[str, Any] = {
    "kv_connector": "LMCacheMPConnector",
    "kv_role": "kv_both",
}


@dataclass(frozen=True, slots=True)
class AgentOptions(Folders):
    """Sizes of the demo; the defaults take about eight minutes on two cores."""

    programs: int = option(12, "How many agents.", min=1)
    blocks: int = option(384, "KV pool, in blocks of 32 tokens.", min=16)
    token_scale: float = option(0.08, "Factor on the paper's token counts.")
    """Factor on the paper's token counts (70,126 a program)."""
    gap_cap_s: float = option(10.0, "Longest tool call, seconds.", "--gap-cap")
    seed: int = option(0, "Seed of the workload; each round has its own.")
    trace: Path | None = option(None, "Replay this trace (gzip JSON lines).")
    rate: float = 1.0
    """Agent arrivals per second."""
    at_once: int | None = None
    """Most agents in progress; all arrive at once then, whatever `rate` says."""
    hints: bool = True
    """Agents say program, tool and last step; else the server has to find out."""
    cpu_gb: float = 1.5
    """CPU memory of each arm that has a lower tier; GiB for LMCache, GB for ours."""
    chunk_tokens: int = 32
    """Of LMCache, whose default is 256: these contexts are short."""

    @property
    def tiers(self) -> TierOptions:
        """The LMCache server of each arm above one."""
        return TierOptions(cpu_gb=self.cpu_gb, chunk_tokens=self.chunk_tokens)

    def server(self, kv_transfer_config: Mapping[str, Any] | None) -> ServerOptions:
        """The servers differ in the transfer config only."""
        return ServerOptions.of_tiny_model(self.blocks, kv_transfer_config)

    def replay(self) -> ReplayOptions:
        """How the agents make their requests."""
        return ReplayOptions(seed=self.seed, hints=self.hints, at_once=self.at_once)

    def workload(self) -> tuple[Program, ...]:
        """The programs to replay.

        Raises:
            TraceError: the trace cannot be read.
            ValueError: a program does not fit into the pool.
        """
        room = self.server(None).max_model_len
        if self.trace is None:
            programs = synthetic(
                self.programs, self.rate, self.seed, self.token_scale, self.gap_cap_s
            )
        else:
            scale = TraceScale(
                mean_context_tokens=round(SWE_BENCH.tokens.mean * self.token_scale),
                max_context_tokens=room,
                gap_cap_s=self.gap_cap_s,
            )
            programs = from_trace(
                self.trace, self.programs, self.rate, self.seed, scale
            )
        if self.at_once is not None:
            programs = shuffled(programs, self.seed)
        longest = longest_context(programs)
        if longest > room:
            raise ValueError(
                f"the longest program has {longest} tokens, the pool holds {room}: "
                "raise --blocks or lower --token-scale"
            )
        return programs


@dataclass(frozen=True, slots=True)
class ComparisonOptions(AgentOptions):
    """And what the arms are that are sent them, one after the other."""

    rate: float = option(1.0, "Agent arrivals per second.")
    policy: str | None = option(None, "Retention policy of the ttlcache arms.")
    connector_config: Mapping[str, Any] = option(
        {}, "JSON object: kv_connector_extra_config of the ttlcache arms."
    )
    rounds: int = 1
    """How often each arm is played."""

    @property
    def connector(self) -> dict[str, Any]:
        """``kv_connector_extra_config`` of the ttlcache arms."""
        policy = {} if self.policy is None else {"policy": self.policy}
        return {**self.connector_config, **policy}


def arm_of(
    name: str, transfer: Mapping[str, Any] | None, options: ComparisonOptions
) -> Arm:
    """An arm with the options of all, above an LMCache server if it needs one."""
    if transfer is None:
        return Arm(name, options.server(None))
    extra = transfer.get("kv_connector_extra_config", {})
    if transfer["kv_connector"] == CONNECTOR["kv_connector"]:
        extra = {**options.connector, **extra}
    is_above = (
        transfer["kv_connector"] == LMCACHE["kv_connector"]
        or extra.get("lower_tier") == "lmcache"
    )
    server = options.server({**transfer, "kv_connector_extra_config": extra})
    return Arm(name, server, options.tiers if is_above else None)
