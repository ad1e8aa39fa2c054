"""The demo: the same agents on vLLM with and without TTLConnector, and above LMCache.

The KV pool holds one or two programs while several are in progress, so vanilla vLLM
evicts a program's context while its tool runs and prefills it again afterwards; vLLM
with LMCache copies it to CPU memory and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.command import Folders, option
from bench.compare import demo_report, timeline
from bench.compare.rounds import PairedRounds, turns_shown
from bench.serve import tiny_model
from bench.serve.arms import Arm, ArmResult, run_arm
from bench.serve.replay import ReplayOptions
from bench.serve.server import ServerOptions
from bench.sim.load.programs import Program
from bench.sim.load.scaled import (
    SWE_BENCH,
    TraceScale,
    from_trace,
    longest_context,
    shuffled,
    synthetic,
)
from ttlcache_connector.lmcache_server.launch import TierOptions

#: The flag that turns ttlcache on, as the README gives it.
CONNECTOR: Mapping[str, Any] = {"kv_connector": "TTLConnector", "kv_role": "kv_both"}
#: What turns LMCache on without ttlcache; its server's address comes with the arm.
LMCACHE: Mapping[str, Any] = {
    "kv_connector": "LMCacheMPConnector",
    "kv_role": "kv_both",
}


@dataclass(frozen=True, slots=True)
class DemoOptions(Folders):
    """Sizes of the demo; the defaults take about eight minutes on two cores."""

    programs: int = option(12, "How many agents.", min=1)
    rate: float = option(1.0, "Agent arrivals per second.")
    blocks: int = option(384, "KV pool, in blocks.", min=16)
    """KV pool of the servers, in blocks of 32 tokens."""
    token_scale: float = option(0.08, "Factor on the paper's token counts.")
    """Factor on the paper's token counts (70,126 a program)."""
    gap_cap_s: float = option(10.0, "Longest tool call, seconds.", "--gap-cap")
    seed: int = option(0, "Seed of the workload.")
    trace: Path | None = option(None, "Replay this trace (gzip JSON lines).")
    out: Path = Path("out/demo")
    policy: str | None = option(None, "Retention policy of the ttlcache arm.")
    connector_config: Mapping[str, Any] = option(
        {}, "JSON object: kv_connector_extra_config."
    )
    at_once: int | None = None
    """Most agents in progress; all arrive at once then, whatever `rate` says."""
    hints: bool = True
    """Agents say program, tool and last step; else the server has to find out."""
    cpu_gb: float = 1.5
    """CPU memory of the LMCache server of each arm above one, GiB."""
    chunk_tokens: int = 256

    @property
    def tiers(self) -> TierOptions:
        """The LMCache server of each arm above one."""
        return TierOptions(cpu_gb=self.cpu_gb, chunk_tokens=self.chunk_tokens)

    @property
    def connector(self) -> dict[str, Any]:
        """``kv_connector_extra_config`` of the ttlcache arms."""
        policy = {} if self.policy is None else {"policy": self.policy}
        return {**self.connector_config, **policy}

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


def demo(options: DemoOptions, console: Console) -> int:
    """The same agents without TTLConnector and with it, alone and above LMCache."""
    programs = options.workload()
    options.out.mkdir(parents=True, exist_ok=True)
    model = tiny_model.build(options.model)
    record_path = (options.out / "recording").absolute()
    pairs = _pairs(options, str(record_path))
    arms = {arm.name: arm for pair in pairs for arm in pair}
    _announce(options, programs, console)

    def play(name: str, _: int) -> ArmResult:
        with turns_shown(name, programs, console) as on_turn:
            return run_arm(
                arms[name],
                model,
                programs,
                options.replay(),
                options.out / f"server-{name}.log",
                on_turn=on_turn,
            )

    def results(done: list[dict[str, ArmResult]]) -> tuple[dict[str, Any], list[str]]:
        played = done[0]
        outputs = demo_report.outputs_of(list(played.values()))
        return {
            "arms": {arm.name: demo_report.arm_json(arm) for arm in played.values()},
            "savings": {
                ours.name: demo_report.savings(played[plain.name], played[ours.name])
                for plain, ours in pairs
                if ours.name in played
            },
            "tokens_identical": outputs.tokens_identical,
            "first_token_logprob_max_diff": outputs.first_token_logprob_max_diff,
        }, demo_report.problems(list(played.values()))

    rounds = PairedRounds(options.out, asdict(options), console, results)
    (found,) = rounds.play(list(arms), 1, play)
    png_path = options.out / "timeline.png"
    timeline.draw(
        {arm.name: arm.records for arm in found.values()},
        png_path,
        f"{len(programs)} programs, KV pool of {options.blocks} blocks of 32 tokens",
    )
    done = [(found[plain.name], found[ours.name]) for plain, ours in pairs]
    console.print(demo_report.table(done))
    console.print(f"timeline: {png_path}", soft_wrap=True)
    console.print(f"recording: {record_path}", soft_wrap=True)
    return rounds.status()


def _pairs(options: DemoOptions, record_path: str) -> list[tuple[Arm, Arm]]:
    """Without ttlcache and with it; the second pair above LMCache servers."""

    def ours(**extra: Any) -> ServerOptions:
        config = {**extra, **options.connector}
        return options.server({**CONNECTOR, "kv_connector_extra_config": config})

    tiers = options.tiers
    return [
        (
            Arm("vanilla", options.server(None)),
            Arm("ttlcache", ours(record_path=record_path)),
        ),
        (
            Arm("lmcache", options.server(LMCACHE), tiers=tiers),
            Arm("ttlcache+lmcache", ours(lower_tier="lmcache"), tiers=tiers),
        ),
    ]


def _announce(
    options: DemoOptions, programs: Sequence[Program], console: Console
) -> None:
    num_turns = sum(len(program.turns) for program in programs)
    tokens = sum(program.context_tokens for program in programs) / len(programs)
    source = "synthetic (SWE-bench shape)" if options.trace is None else options.trace
    console.print(
        f"{len(programs)} programs of {num_turns / len(programs):.1f} turns and "
        f"{tokens:,.0f} tokens, {options.rate:g} arrivals/s, {source}; KV pool of "
        f"{options.blocks * 32:,} tokens",
        soft_wrap=True,
    )
