"""Connectors and their settings against each other on real vLLM, in alternating rounds.

Every round is another seed of the demo's programs, replayed once by each arm, on
servers of its own; the order of the arms turns around with each round. Compare ratios
of a round: seconds of two rounds are of different programs, and of a machine that may
have been busier.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.compare import demo_report
from bench.compare.demo import CONNECTOR, LMCACHE, DemoOptions
from bench.ratios import Ratio
from bench.serve import tiny_model
from bench.serve.arms import Arm, ArmResult, run_arm

#: In place of a setting: vLLM without a connector, and with LMCache's.
VANILLA, PLAIN_LMCACHE = "vanilla", "lmcache"
RESULT = "result.json"
#: An arm takes minutes: a machine that is busy for a while must not cost it.
START_TIMEOUT_S = 600.0
#: What arms are compared by: the name in a summary, the name in print.
COMPARED = {
    "mean_jct_s": "mean JCT",
    "output_tokens_per_s": "tokens a second",
    "p99_turn_s": "turn p99",
}

#: `kv_transfer_config` by an arm's text, the first one the base; None: no connector.
Settings = Mapping[str, Mapping[str, Any] | None]
Rounds = list[dict[str, ArmResult]]


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


def run(options: DemoOptions, settings: Settings, rounds: int, console: Console) -> int:
    """All rounds; writes result.json, prints the table.

    Returns:
        The exit status: 1 when a request failed, a server logged an error, or outputs
        of a round differ.
    """
    done = measure(options, settings, rounds, console)
    found = problems(done)
    for problem in found:
        console.print(f"problem: {problem}", soft_wrap=True, markup=False)
    return 1 if found else 0


def measure(
    options: DemoOptions, settings: Settings, rounds: int, console: Console
) -> Rounds:
    """All rounds; writes result.json, prints the table and the ratios."""
    rounds_options = [
        replace(options, seed=options.seed + n, out=options.out / f"round-{n}")
        for n in range(rounds)
    ]
    for one in rounds_options:
        one.workload()  # what does not fit must not cost the rounds before it
    model = tiny_model.build(options.model)
    done: Rounds = []
    for number, one in enumerate(rounds_options):
        done.append({})
        for index, name in _in_turn(settings, number):
            console.print(f"round {number + 1} of {rounds}: {name}", soft_wrap=True)
            log_path = one.out / f"server-{index}.log"
            log_path.parent.mkdir(parents=True, exist_ok=True)
            done[-1][name] = _run_one(name, settings[name], one, model, log_path)
        _write(done, options)
    console.print(table(done, list(settings)))
    for line in lines(done, list(settings)):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(f"result: {options.out / RESULT}", soft_wrap=True)
    return done


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


def table(done: Rounds, names: Sequence[str]) -> Table:
    """A row an arm: seconds by round, means of the rest."""
    grid = Table(title="the same programs", title_justify="left")
    grid.add_column("arm", overflow="fold")
    for name in ("mean JCT s", "turn p99 s", "tokens/s", "hit", "running", "wait s"):
        grid.add_column(name, justify="right")
    for name in ("steps", "tokens computed", "reloaded"):
        grid.add_column(name, justify="right")
    for name in names:
        summaries = [one[name].summary for one in done]
        engines = [one[name].engine for one in done]
        grid.add_row(
            name,
            " ".join(f"{summary.mean_jct_s:.2f}" for summary in summaries),
            " ".join(f"{summary.p99_turn_s:.2f}" for summary in summaries),
            " ".join(f"{summary.output_tokens_per_s:.0f}" for summary in summaries),
            f"{statistics.fmean(summary.prompt_hit for summary in summaries):.3f}",
            f"{statistics.fmean(summary.mean_running for summary in summaries):.2f}",
            f"{statistics.fmean(summary.mean_wait_s for summary in summaries):.2f}",
            f"{statistics.fmean(engine.steps for engine in engines):.0f}",
            f"{statistics.fmean(engine.step_tokens for engine in engines):.0f}",
            f"{statistics.fmean(engine.lower_tier_hits for engine in engines):.0f}",
        )
    return grid


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


def _in_turn(settings: Settings, number: int) -> list[tuple[int, str]]:
    order = list(enumerate(settings))
    return order if number % 2 == 0 else order[::-1]


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
            extra = {**options.connector_config, **extra}
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
    if name == PLAIN_LMCACHE:
        return {**LMCACHE, "kv_connector_extra_config": _object(text, rest or "{}")}
    return {**CONNECTOR, "kv_connector_extra_config": _object(text, text)}


def _object(text: str, part: str) -> Mapping[str, Any]:
    try:
        value = json.loads(part)
    except json.JSONDecodeError as error:
        raise ValueError(f"--with {text}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(
            f"--with {text}: expected a JSON object, {VANILLA}, or {PLAIN_LMCACHE}"
        )
    return value


def _write(done: Rounds, options: DemoOptions) -> None:
    """What is known so far, after every round."""
    result = {
        "rounds": [
            {name: demo_report.arm_json(arm) for name, arm in one.items()}
            for one in done
        ],
        **demo_report.context_json(problems(done), asdict(options)),
    }
    (options.out / RESULT).write_text(json.dumps(result, indent=1) + "\n")
