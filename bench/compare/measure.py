"""Connectors and their settings against each other on real vLLM, in alternating rounds.

Every round is another seed of the same agents' programs, replayed once by each arm, on
servers of its own; the order of the arms turns around with each round. Compare ratios
of a round: seconds of two rounds are of different programs, and of a machine that may
have been busier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console

from bench.compare import report
from bench.compare.agents import ComparisonOptions, arm_of
from bench.compare.report import Rounds
from bench.compare.rounds import play_rounds, turns_shown
from bench.serve import tiny_model
from bench.serve.arms import ArmResult, run_arm

#: `kv_transfer_config` by an arm's name, the first one the base; None: no connector.
Settings = Mapping[str, Mapping[str, Any] | None]


def measure(
    options: ComparisonOptions, settings: Settings, console: Console
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
    # All of them first: what does not fit must not cost the rounds before it.
    workloads = [one.workload() for one in each]
    model, names = tiny_model.build(options.model), list(settings)

    def play(name: str, number: int) -> ArmResult:
        programs = workloads[number]
        with turns_shown(name, programs, console) as on_turn:
            return run_arm(
                arm_of(name, settings[name], options),
                model,
                programs,
                each[number].replay(),
                each[number].out / f"server-{names.index(name)}.log",
                on_turn=on_turn,
            )

    done, status = play_rounds(names, options, console, play, report.results)
    console.print(report.arms_table(done, names))
    for line in report.lines(done, names):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return done, status
