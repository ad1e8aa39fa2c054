"""The demo: the same agents on vLLM without TTLConnector and with it.

Two pairs of arms: GPU memory alone; CPU memory below it, LMCache's for plain vLLM and
the tier in the box for ttlcache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.compare import report
from bench.compare.agents import CONNECTOR, LMCACHE, ComparisonOptions
from bench.compare.measure import Settings, measure


@dataclass(frozen=True, slots=True)
class DemoOptions(ComparisonOptions):
    """The agents as they are."""

    out: Path = Path("out/demo")

    @property
    def recording(self) -> Path:
        """What the ttlcache arm records."""
        return (self.out / "recording").absolute()

    def settings(self) -> Settings:
        """By arm."""

        def ours(**extra: Any) -> dict[str, Any]:
            return {**CONNECTOR, "kv_connector_extra_config": extra}

        return {
            "vanilla": None,
            "ttlcache": ours(record_path=str(self.recording)),
            "lmcache": LMCACHE,
            "ttlcache+cpu": ours(lower_tier="cpu", cpu_gb=self.cpu_gb),
        }


def demo(options: DemoOptions, console: Console) -> int:
    """The same agents without TTLConnector and with it, with CPU memory and without."""
    programs = options.workload()
    num_turns = sum(len(program.turns) for program in programs)
    tokens = sum(program.context_tokens for program in programs) / len(programs)
    source = options.trace or "synthetic (SWE-bench shape)"
    console.print(
        f"{len(programs)} programs of {num_turns / len(programs):.1f} turns and "
        f"{tokens:,.0f} tokens, {options.rate:g} arrivals/s, {source}; KV pool of "
        f"{options.blocks * 32:,} tokens",
        soft_wrap=True,
    )
    (done,), status = measure(options, options.settings(), console)
    for ours in ("ttlcache", "ttlcache+cpu"):
        line = report.savings(done["vanilla"], done[ours])
        console.print(line, soft_wrap=True, highlight=False)
    if not status:
        console.print("Every arm gave the same tokens.")
    console.print(f"recording: {options.recording}", soft_wrap=True)
    return status
