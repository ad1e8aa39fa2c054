"""Above an LMCache server: TTLConnector is never worse than LMCache's own connector.

Both on the same programs in alternating rounds, each above an LMCache server of its
own: once with more programs at a time than the pool holds, once with a few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console

from bench.compare import settings
from bench.compare.demo import DemoOptions
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


def run(
    loads: Mapping[str, tuple[DemoOptions, Mapping[str, Bar]]],
    rounds: int,
    console: Console,
) -> int:
    """Every load in turn; prints the verdict on every bar.

    Returns:
        The exit status: 1 when a bar is missed, a request failed, a server logged an
        error, or outputs of a round differ.
    """
    arms = settings.parse(ARMS)
    found: list[str] = []
    verdicts: list[str] = []
    for name, (options, bars) in loads.items():
        console.print(f"load: {name}", soft_wrap=True)
        done = settings.measure(options, arms, rounds, console)
        found += [f"{name}, {problem}" for problem in settings.problems(done)]
        told = verdict(done, bars)
        verdicts += [f"{name}: {line}" for line in told.values()]
        found += [f"{name}: {told[what]}" for what in missed(done, bars)]
    for line in verdicts:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    for problem in found:
        console.print(f"problem: {problem}", soft_wrap=True, markup=False)
    return 1 if found else 0


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
