"""The demo: the same agents on vLLM with and without TTLConnector, and above LMCache.

The KV pool holds one or two programs while several are in progress, so vanilla vLLM
evicts a program's context while its tool runs and prefills it again afterwards; vLLM
with LMCache copies it to CPU memory and back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from bench.compare import demo_report, timeline
from bench.serve import tiny_model
from bench.serve.arms import Arm, ArmResult, run_arm
from bench.serve.replay import ReplayOptions
from bench.serve.server import ServerOptions
from bench.sim.traces import TraceScale, from_trace
from bench.sim.workloads import SWE_BENCH, Program, longest_context, shuffled, synthetic
from ttlcache_connector.lmcache_server.launch import TierOptions

#: The flag that turns ttlcache on, as the README gives it.
CONNECTOR: Mapping[str, Any] = {"kv_connector": "TTLConnector", "kv_role": "kv_both"}
#: What turns LMCache on without ttlcache; its server's address comes with the arm.
LMCACHE: Mapping[str, Any] = {
    "kv_connector": "LMCacheMPConnector",
    "kv_role": "kv_both",
}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Sizes of the demo; the defaults take about eight minutes on two cores."""

    programs: int = 12
    rate: float = 1.0
    """Program arrivals per second."""
    blocks: int = 384
    """KV pool of the servers, in blocks of 32 tokens."""
    token_scale: float = 0.08
    """Factor on the paper's token counts (70,126 a program)."""
    gap_cap_s: float = 10.0
    """Longest tool call in seconds."""
    seed: int = 0
    trace: Path | None = None
    """A trace file to replay in place of the synthetic programs."""
    out: Path = Path("out/demo")
    model: Path = Path("out/models/tiny")
    connector_config: Mapping[str, Any] = field(default_factory=dict)
    """``kv_connector_extra_config`` of the ttlcache arms."""
    at_once: int | None = None
    """Most agents in progress; all arrive at once then, whatever `rate` says."""
    hints: bool = True
    """Agents say program, tool and last step; else the server has to find out."""
    tiers: TierOptions = field(default_factory=lambda: TierOptions(cpu_gb=1.5))
    """The LMCache server of each arm above one."""

    def server(self, kv_transfer_config: Mapping[str, Any] | None) -> ServerOptions:
        """The servers differ in the transfer config only."""
        base = ServerOptions(num_blocks=self.blocks)
        # One block is vLLM's null block; a longer sequence could never be served.
        room = (self.blocks - 1) * base.block_size
        return ServerOptions(
            num_blocks=self.blocks,
            max_model_len=min(room, tiny_model.DEFAULT_SHAPE.max_position),
            kv_transfer_config=kv_transfer_config,
        )

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


def run_demo(options: DemoOptions, console: Console) -> int:
    """Run all arms, write result.json and timeline.png, print the table.

    Returns:
        The exit status: 1 when outputs differ, a request failed or a server
        logged an error.
    """
    programs = options.workload()
    options.out.mkdir(parents=True, exist_ok=True)
    model = tiny_model.build(options.model)
    record_path = options.out / "recording"
    pairs = _pairs(options, str(record_path.absolute()))
    _announce(options, programs, console)
    done = [
        (
            _run(plain, model, programs, options, console),
            _run(ours, model, programs, options, console),
        )
        for plain, ours in pairs
    ]
    arms = [arm for pair in done for arm in pair]

    outputs = demo_report.outputs_of(arms)
    found = demo_report.problems(arms)
    result_path = options.out / "result.json"
    result = {
        "arms": {arm.name: demo_report.arm_json(arm) for arm in arms},
        "savings": {
            ours.name: demo_report.savings(plain, ours) for plain, ours in done
        },
        "tokens_identical": outputs.tokens_identical,
        "first_token_logprob_max_diff": outputs.first_token_logprob_max_diff,
        **demo_report.context_json(found, asdict(options)),
    }
    result_path.write_text(json.dumps(result, indent=1) + "\n")
    png_path = timeline.draw(
        {arm.name: arm.records for arm in arms},
        options.out / "timeline.png",
        f"{len(programs)} programs, KV pool of {options.blocks} blocks of 32 tokens",
    )
    console.print(demo_report.table(done))
    console.print(f"result:   {result_path}", soft_wrap=True)
    console.print(f"timeline: {png_path}", soft_wrap=True)
    console.print(f"recording: {record_path.absolute()}", soft_wrap=True)
    for problem in found:
        console.print(f"[red]problem:[/] {escape(problem)}", soft_wrap=True)
    return 1 if found else 0


def _pairs(options: DemoOptions, record_path: str) -> list[tuple[Arm, Arm]]:
    """Without ttlcache and with it; the second pair above LMCache servers."""
    config = options.connector_config
    ours = {
        **CONNECTOR,
        "kv_connector_extra_config": {"record_path": record_path, **config},
    }
    below = {
        **CONNECTOR,
        "kv_connector_extra_config": {"lower_tier": "lmcache", **config},
    }
    return [
        (Arm("vanilla", options.server(None)), Arm("ttlcache", options.server(ours))),
        (
            Arm("lmcache", options.server(LMCACHE), tiers=options.tiers),
            Arm("ttlcache+lmcache", options.server(below), tiers=options.tiers),
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


def _run(
    arm: Arm,
    model: Path,
    programs: Sequence[Program],
    options: DemoOptions,
    console: Console,
) -> ArmResult:
    num_turns = sum(len(program.turns) for program in programs)
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("turns"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{arm.name}: starting vLLM (30 s)", total=num_turns)
        result = run_arm(
            arm,
            model,
            programs,
            options.replay(),
            options.out / f"server-{arm.name}.log",
            on_turn=lambda _: progress.update(
                task, advance=1, description=f"{arm.name}: replaying"
            ),
        )
        progress.update(task, description=f"{arm.name}: done")
    return result
