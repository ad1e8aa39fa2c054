"""Connectors and their settings against each other on real vLLM, in alternating rounds.

Every round is another seed of the demo's programs, replayed once by each arm, on
servers of its own; the order of the arms turns around with each round. Compare ratios
of a round: seconds of two rounds are of different programs, and of a machine that may
have been busier.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.command import json_object, option
from bench.compare import demo_report
from bench.compare.demo import CONNECTOR, LMCACHE, DemoOptions
from bench.compare.rounds import START_TIMEOUT_S, PairedRounds
from bench.ratios import Ratio
from bench.serve import tiny_model
from bench.serve.arms import Arm, ArmResult, run_arm
from bench.tables import table

#: In place of a setting: vLLM without a connector, and with LMCache's.
VANILLA, PLAIN_LMCACHE = "vanilla", "lmcache"
#: What arms are compared by: the name in a summary, the name in print.
COMPARED = {
    "mean_jct_s": "mean JCT",
    "output_tokens_per_s": "tokens a second",
    "p99_turn_s": "turn p99",
}

#: `kv_transfer_config` by an arm's text, the first one the base; None: no connector.
Settings = Mapping[str, Mapping[str, Any] | None]
Rounds = list[dict[str, ArmResult]]


@dataclass(frozen=True, slots=True)
class RoundsOptions(DemoOptions):
    """The demo's agents, in rounds, on servers that may stand above LMCache."""

    rounds: int = option(3, "How often each.", min=1)
    programs: int = 24
    blocks: int = 768
    at_once: int | None = option(
        None, "So many agents at a time; --rate counts no more.", min=1
    )
    hints: bool = option(True, "Agents say program, tool and last step.")
    cpu_gb: float = option(1.5, "CPU memory of each LMCache server, GiB.")
    chunk_tokens: int = option(
        256, "Tokens of an LMCache chunk, a multiple of 32.", min=32
    )
    seed: int = option(0, "Of the first round; each has its own.")


@dataclass(frozen=True, slots=True)
class SettingsOptions(RoundsOptions):
    """`with_`: the texts of the arms, see `parse`."""

    with_: list[str] = option(
        [],
        "A JSON object: TTLConnector with this kv_connector_extra_config; "
        "vanilla: no connector; lmcache, or lmcache:{...}: LMCache's own connector "
        "and its configuration. Say it twice or more; the first one is what the "
        "others are compared with. Each arm above LMCache has its own server.",
        "--with",
    )
    out: Path = Path("out/settings")

    def __post_init__(self) -> None:
        parse(self.with_)


def parse(texts: Sequence[str]) -> Settings:
    """Arms from JSON objects, `VANILLA`, or `PLAIN_LMCACHE` with ":{...}" or without.

    Raises:
        ValueError: fewer than two, the same one twice, no JSON object.
    """
    if len(texts) < 2:
        raise ValueError("give --with at least twice: settings are compared")
    found: dict[str, Mapping[str, Any] | None] = {}
    for text in texts:
        if text in found:
            raise ValueError(f"--with {text}: given twice")
        found[text] = _transfer_config(text)
    return found


def settings(options: SettingsOptions, console: Console) -> int:
    """Connectors and settings against each other on real vLLM, round by round."""
    return measure(options, parse(options.with_), console)[1]


def measure(
    options: RoundsOptions, settings: Settings, console: Console
) -> tuple[Rounds, int]:
    """All rounds; writes result.json, prints the table, the ratios, what is wrong.

    Returns:
        The rounds, and the exit status: 1 when a request failed, a server logged an
        error, or outputs of a round differ.
    """
    each = [
        replace(options, seed=options.seed + n, out=options.out / f"round-{n}")
        for n in range(options.rounds)
    ]
    for one in each:
        one.workload()  # what does not fit must not cost the rounds before it
    model, names = tiny_model.build(options.model), list(settings)

    def play(name: str, number: int) -> ArmResult:
        log_path = each[number].out / f"server-{names.index(name)}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        return _run_one(name, settings[name], each[number], model, log_path)

    def results(done: Rounds) -> tuple[dict[str, Any], list[str]]:
        return {
            "rounds": [
                {name: demo_report.arm_json(arm) for name, arm in one.items()}
                for one in done
            ]
        }, problems(done)

    rounds = PairedRounds(options.out, asdict(options), console, results)
    done = rounds.play(names, options.rounds, play)
    console.print(rounds_table(done, names))
    for line in lines(done, names):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return done, rounds.status()


def ratios(done: Rounds, names: Sequence[str], what: str) -> dict[str, Ratio]:
    """Of every arm but the first, over the first.

    Args:
        what: one of `COMPARED`.
    """
    return {
        name: Ratio(
            tuple(
                getattr(one[name].summary, what) / getattr(one[names[0]].summary, what)
                for one in done
            )
        )
        for name in names[1:]
    }


def rounds_table(done: Rounds, names: Sequence[str]) -> Table:
    """A row an arm: seconds by round, means of the rest."""
    rows = []
    for name in names:
        summaries = [one[name].summary for one in done]
        engines = [one[name].engine for one in done]
        by_round = [
            " ".join(f"{getattr(summary, what):.{digits}f}" for summary in summaries)
            for what, digits in (
                ("mean_jct_s", 2),
                ("p99_turn_s", 2),
                ("output_tokens_per_s", 0),
            )
        ]
        means = [
            f"{statistics.fmean(getattr(one, what) for one in own):.{digits}f}"
            for own, what, digits in (
                (summaries, "prompt_hit", 3),
                (summaries, "mean_running", 2),
                (summaries, "mean_wait_s", 2),
                (engines, "steps", 0),
                (engines, "step_tokens", 0),
                (engines, "lower_tier_hits", 0),
            )
        ]
        rows.append([name, *by_round, *means])
    columns = ["arm", "mean JCT s", "turn p99 s", "tokens/s", "hit", "running"]
    columns += ["wait s", "steps", "tokens computed", "reloaded"]
    return table("the same programs", columns, rows)


def lines(done: Rounds, names: Sequence[str]) -> list[str]:
    """Every arm over the first, a line each: the mean ratio and that of each round."""
    found = []
    for name in names[1:]:
        parts = [
            f"{label} {told(ratios(done, names, what)[name])}"
            for what, label in COMPARED.items()
        ]
        found.append(f"{name} over {names[0]}: {', '.join(parts)}")
    return found


def problems(done: Rounds) -> list[str]:
    """What was wrong in each round; outputs are compared within it."""
    return [
        f"round {number}: {problem}"
        for number, one in enumerate(done, start=1)
        for problem in demo_report.problems(list(one.values()))
    ]


def told(ratio: Ratio) -> str:
    """The mean ratio, its standard error, and that of each round."""
    values = ", ".join(f"{value:.2f}" for value in ratio.by_round)
    if math.isnan(ratio.standard_error):
        return f"{ratio.geometric_mean:.2f}x"
    return f"{ratio} ({values})"


def _run_one(
    name: str,
    transfer: Mapping[str, Any] | None,
    options: DemoOptions,
    model: Path,
    log_path: Path,
) -> ArmResult:
    tiers = None
    if transfer is not None:
        extra = transfer["kv_connector_extra_config"]
        if transfer["kv_connector"] == CONNECTOR["kv_connector"]:
            extra = {**options.connector, **extra}
        transfer = {**transfer, "kv_connector_extra_config": extra}
        is_above = extra.get("lower_tier", "none") != "none"
        if is_above or transfer["kv_connector"] == LMCACHE["kv_connector"]:
            tiers = options.tiers
    return run_arm(
        Arm(name, options.server(transfer), START_TIMEOUT_S, tiers),
        model,
        options.workload(),
        options.replay(),
        log_path,
    )


def _transfer_config(text: str) -> Mapping[str, Any] | None:
    if text == VANILLA:
        return None
    name, _, rest = text.partition(":")
    connector, part = CONNECTOR, text
    if name == PLAIN_LMCACHE:
        connector, part = LMCACHE, rest or "{}"
    try:
        extra = json_object(f"--with {text}", part)
    except ValueError as error:
        expected = f"expected a JSON object, {VANILLA}, or {PLAIN_LMCACHE}"
        raise ValueError(f"{error}; {expected}") from None
    return {**connector, "kv_connector_extra_config": extra}
