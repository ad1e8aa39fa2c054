"""Above an LMCache server: TTLConnector is never worse than LMCache's own connector.

Both on the same programs in alternating rounds, each above an LMCache server of its
own: once with more programs at a time than the pool holds, once with a few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from bench.command import option
from bench.compare import settings
from bench.compare.settings import RoundsOptions
from bench.ratios import Ratio

#: The arms; the first one is what would run without ttlcache.
ARMS = (settings.PLAIN_LMCACHE, '{"lower_tier": "lmcache"}')


@dataclass(frozen=True, slots=True)
class Bar:
    """How a ratio to LMCache's own connector may be at most; `least`: at least."""

    bound: float
    is_least: bool = False

    def is_met(self, ratio: Ratio) -> bool:
        mean = round(ratio.geometric_mean, 3)
        return mean >= self.bound if self.is_least else mean <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.bound:.2f}x"


#: By what is compared.
LOADED = {
    "mean_jct_s": Bar(1.00),
    "output_tokens_per_s": Bar(0.97, is_least=True),
    "p99_turn_s": Bar(1.20),
}
LIGHT = {
    "mean_jct_s": Bar(1.02),
    "output_tokens_per_s": Bar(0.98, is_least=True),
    "p99_turn_s": Bar(1.02),
}


@dataclass(frozen=True, slots=True)
class AboveTierOptions(RoundsOptions):
    """A full load and, of the same agents, a light one."""

    rounds: int = option(3, "Pairs of each load.", min=1)
    programs: int = option(28, "Agents of the full load.", min=1)
    at_once: int | None = option(18, "So many of them at a time.", min=1)
    light_programs: int = option(8, "Agents of the light load; 0: without it.", min=0)
    light_at_once: int = option(2, "So many of them at a time.", min=1)
    blocks: int = option(257, "KV pool, blocks of 32 tokens.", min=16)
    seed: int = option(0, "Of the first round.")
    trace: Path | None = option(
        None, "Recorded agents (gzip JSON lines); else synthetic ones."
    )
    token_scale: float = 0.035
    gap_cap_s: float = 3.0
    hints: bool = False
    out: Path = Path("out/above-tier")


def above_tier(options: AboveTierOptions, console: Console) -> int:
    """TTLConnector against LMCache's connector, each above an LMCache server."""
    full = replace(options, out=options.out / "full")
    light = replace(
        options,
        programs=options.light_programs,
        at_once=options.light_at_once,
        out=options.out / "light",
    )
    loads = {"full load": (full, LOADED)}
    if options.light_programs:
        loads["light load"] = (light, LIGHT)
    arms, failed = settings.parse(ARMS), 0
    verdicts: list[str] = []
    for name, (load, bars) in loads.items():
        console.print(f"load: {name}", soft_wrap=True)
        done, status = settings.measure(load, arms, console)
        failed |= status or bool(missed(done, bars))
        verdicts += [f"{name}: {line}" for line in verdict(done, bars).values()]
    for line in verdicts:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return int(failed)


def verdict(done: settings.Rounds, bars: Mapping[str, Bar]) -> dict[str, str]:
    """A line for each bar."""
    return {
        what: f"{settings.COMPARED[what]} {settings.told(_ratio(done, what))}, "
        f"bar {bar}: {'met' if bar.is_met(_ratio(done, what)) else 'MISSED'}"
        for what, bar in bars.items()
    }


def missed(done: settings.Rounds, bars: Mapping[str, Bar]) -> list[str]:
    """What is compared and does not keep to its bar."""
    return [what for what, bar in bars.items() if not bar.is_met(_ratio(done, what))]


def _ratio(done: settings.Rounds, what: str) -> Ratio:
    return settings.ratios(done, ARMS, what)[ARMS[1]]
