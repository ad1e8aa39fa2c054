"""Settings of the connector against each other on real vLLM, in alternating rounds.

Every round is another seed of the demo's programs, replayed once under each setting, on
a server of its own; the order of the settings turns around with each round. Compare
ratios of a round: seconds of two rounds are of different programs, and of a machine
that may have been busier.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import demo_report, tiny_model
from bench.arms import Arm, ArmResult, run_arm
from bench.demo import CONNECTOR, DemoOptions
from bench.metrics import compare_outputs
from bench.ratios import Ratio
from bench.replay import ReplayOptions

#: In place of a setting: vLLM without the connector.
VANILLA = "vanilla"
RESULT = "result.json"
#: An arm takes minutes: a machine that is busy for a while must not cost it.
START_TIMEOUT_S = 600.0

#: Settings by their text, the first one the base; None: no connector.
Settings = Mapping[str, Mapping[str, Any] | None]
Rounds = list[dict[str, ArmResult]]


def parse(texts: Sequence[str]) -> Settings:
    """Settings from JSON objects, or `VANILLA`.

    Raises:
        ValueError: fewer than two, the same one twice, no JSON object, a lower tier.
    """
    if len(texts) < 2:
        raise ValueError("give --with at least twice: settings are compared")
    found: dict[str, Mapping[str, Any] | None] = {}
    for text in texts:
        if text in found:
            raise ValueError(f"--with {text}: given twice")
        found[text] = None if text == VANILLA else _object(text)
    return found


def run(options: DemoOptions, settings: Settings, rounds: int, console: Console) -> int:
    """All rounds; writes result.json, prints the table.

    Returns:
        The exit status: 1 when a request failed, a server logged an error, or outputs
        of a round differ.
    """
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
    console.print(f"result: {options.out / RESULT}", soft_wrap=True)
    found = problems(done)
    for problem in found:
        console.print(f"problem: {problem}", soft_wrap=True, markup=False)
    return 1 if found else 0


def ratios(done: Rounds, names: Sequence[str]) -> dict[str, Ratio]:
    """Of every setting but the first, over the first."""
    base = names[0]
    return {
        name: Ratio(
            tuple(
                one[name].summary.mean_jct_s / one[base].summary.mean_jct_s
                for one in done
            )
        )
        for name in names[1:]
    }


def table(done: Rounds, names: Sequence[str]) -> Table:
    """A row a setting: JCTs by round, means of the rest, the ratio to the first."""
    grid = Table(title="settings on the same programs", title_justify="left")
    grid.add_column("setting", overflow="fold")
    for name in ("mean JCT s", "p95 JCT s", "prompt hit", "JCT of the first"):
        grid.add_column(name, justify="right")
    found = ratios(done, names)
    for name in names:
        summaries = [one[name].summary for one in done]
        grid.add_row(
            name,
            " ".join(f"{summary.mean_jct_s:.2f}" for summary in summaries),
            " ".join(f"{summary.p95_jct_s:.2f}" for summary in summaries),
            f"{statistics.fmean(summary.prompt_hit for summary in summaries):.3f}",
            _told(found[name]) if name in found else "",
        )
    return grid


def problems(done: Rounds) -> list[str]:
    """What was wrong in each round; outputs are compared within it."""
    return [
        f"round {number}: {problem}"
        for number, one in enumerate(done, start=1)
        for arm in one.values()
        for problem in demo_report.problems(
            (arm,), compare_outputs(next(iter(one.values())).records, arm.records)
        )
    ]


def _told(ratio: Ratio) -> str:
    values = ", ".join(f"{value:.2f}" for value in ratio.by_round)
    if math.isnan(ratio.standard_error):
        return f"{ratio.geometric_mean:.2f}x"
    return f"{ratio} ({values})"


def _in_turn(settings: Settings, number: int) -> list[tuple[int, str]]:
    order = list(enumerate(settings))
    return order if number % 2 == 0 else order[::-1]


def _run_one(
    name: str,
    setting: Mapping[str, Any] | None,
    options: DemoOptions,
    model: Path,
    log_path: Path,
) -> ArmResult:
    connector = None
    if setting is not None:
        extra = {**options.connector_config, **setting}
        connector = {**CONNECTOR, "kv_connector_extra_config": extra}
    return run_arm(
        Arm(name, options.server(connector), START_TIMEOUT_S),
        model,
        options.workload(),
        ReplayOptions(seed=options.seed),
        log_path,
    )


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--with {text}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"--with {text}: expected a JSON object, or {VANILLA}")
    if value.get("lower_tier", "none") != "none":
        # Its server would still have what the setting before it left there.
        raise ValueError(f"--with {text}: lower tiers are `bench demote`'s")
    return value


def _write(done: Rounds, options: DemoOptions) -> None:
    """What is known so far, after every round."""
    result = {
        "rounds": [
            {name: demo_report.arm_json(arm) for name, arm in one.items()}
            for one in done
        ],
        "problems": problems(done),
        "versions": demo_report.versions(),
        "cpu_count": os.cpu_count(),
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "options": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in asdict(options).items()
        },
    }
    (options.out / RESULT).write_text(json.dumps(result, indent=1) + "\n")
