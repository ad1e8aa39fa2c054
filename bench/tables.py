"""Tables for a terminal: rows of numbers, and what is held against a limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.markup import escape
from rich.table import Table


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: int = 1,
    plain: bool = False,
) -> Table:
    """Text in the first `left` columns, numbers in the others. plain: few lines."""
    grid = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE if plain else box.HEAVY_HEAD,
    )
    for index, name in enumerate(columns):
        is_text = index < left
        grid.add_column(
            name,
            justify="left" if is_text else "right",
            overflow="fold" if is_text else "ellipsis",
        )
    for row in rows:
        grid.add_row(*row)
    return grid


@dataclass(frozen=True, slots=True)
class Check:
    """One promise: what was found, what is allowed. ok: None where nothing is."""

    name: str
    ok: bool | None
    found: str
    allowed: str = ""


def checks_table(title: str, checks: Iterable[Check]) -> Table:
    """One row a promise."""
    marks = {True: "[green]ok[/]", False: "[red]FAILED[/]", None: ""}
    rows = (
        (marks[check.ok], check.name, escape(check.found), escape(check.allowed))
        for check in checks
    )
    return table(title, ("", "", "found", "allowed"), rows, left=4)


def at_most(name: str, found: float, allowed: float, unit: str) -> Check:
    """A number that must not be larger."""
    texts = (f"{number:,.4g} {unit}" for number in (found, allowed))
    return Check(name, found <= allowed, *texts)


def equal(name: str, found: float, allowed: float) -> Check:
    """A number that must be that one."""
    return Check(name, found == allowed, f"{found:g}", f"{allowed:g}")
