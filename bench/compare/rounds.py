"""Arms against each other in paired rounds on real servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from bench.command import command_line, versions, write_json
from bench.compare.agents import ComparisonOptions
from ttlcache_sim.load.programs import Program

T = TypeVar("T")
R = TypeVar("R")

RESULT = "result.json"


def in_turn(arms: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Every arm once a round; the order turns around with each round."""
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            yield number, arm


def play_rounds(
    names: Sequence[str],
    options: ComparisonOptions,
    console: Console,
    play: Callable[[str, int], R],
    results: Callable[[list[dict[str, R]]], tuple[dict[str, Any], list[str]]],
) -> tuple[list[dict[str, R]], int]:
    """Play arms round by round, keep result.json up to date, print what is wrong.

    Args:
        play: an arm in a round, by their name and number.
        results: from the rounds so far, what result.json says of them, and what
            is wrong with them.

    Returns:
        The results of each round by arm, in the order in which they were played, and
        the exit status.
    """
    path = options.out / RESULT
    problems: list[str] = []
    done: list[dict[str, R]] = [{} for _ in range(options.rounds)]
    for number, name in in_turn(names, options.rounds):
        if options.rounds > 1:
            text = f"round {number + 1} of {options.rounds}: {name}"
            console.print(text, soft_wrap=True)
        done[number][name] = play(name, number)
        result, problems = results([one for one in done if one])
        context = {
            "problems": problems,
            "versions": versions(),
            "cpu_count": os.cpu_count(),
            "command": command_line(),
            "options": asdict(options),
        }
        write_json(path, {**result, **context})
    console.print(f"result: {path}", soft_wrap=True)
    for problem in problems:
        console.print(f"[red]problem:[/] {escape(problem)}", soft_wrap=True)
    return done, 1 if problems else 0


@contextmanager
def turns_shown(
    name: str, programs: Sequence[Program], console: Console
) -> Iterator[Callable[[object], None]]:
    """A bar of completed turns; the function counts one."""
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("turns"),
        TimeElapsedColumn(),
    )
    num_turns = sum(len(program.turns) for program in programs)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{name}: starting vLLM (30 s)", total=num_turns)
        yield lambda _: progress.update(
            task, advance=1, description=f"{name}: replaying"
        )
        progress.update(task, description=f"{name}: done")
