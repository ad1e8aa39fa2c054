"""What several commands share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ttlcache.analysis.reader import load
from ttlcache.analysis.recording import Recording, RecordingError

RecordingPath = Annotated[
    Path,
    typer.Argument(help="Folder of a recording, or one of its files."),
]
ServerUrl = Annotated[str, typer.Option("--url", help="Address of the vLLM server.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", envvar="VLLM_API_KEY", help="The server's --api-key, if it has one"
    ),
]
DEFAULT_URL = "http://127.0.0.1:8000"


def printable(text: object) -> str:
    """What clients named, without control characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def plain(text: object) -> str:
    """The same for a terminal, without markup."""
    return escape(printable(text))


def fail(text: object) -> NoReturn:
    """Say what went wrong and end with status 1."""
    console = Console(stderr=True)
    lines = "\n".join(map(plain, str(text).splitlines()))
    console.print(f"[red]error:[/] {lines}", soft_wrap=True)
    raise typer.Exit(1)


def key_headers(api_key: str | None) -> dict[bytes, bytes]:
    """Latin-1, as vLLM reads it. Ends the command where no header can carry the key."""
    try:
        key = (api_key or "").encode("latin-1")
    except UnicodeEncodeError:
        fail("--api-key: no HTTP header can carry it")
    return {b"authorization": b"Bearer " + key} if key else {}


def read(place: Path) -> Recording:
    """The recording, or the end of the command."""
    try:
        recording = load(place)
    except RecordingError as error:
        fail(error)
    except OSError as error:
        fail(f"{place} cannot be read: {error.strerror or error}")
    if not recording.programs:
        fail(f"{place}: the recording holds no program yet")
    return recording


def facts(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Names and their values, one pair a row."""
    grid = Table("", title=title, title_justify="left", box=None)
    grid.add_column("", justify="right")
    for row in rows:
        grid.add_row(*row)
    return grid


def numbers(
    title: str | None, columns: Iterable[str], *, widest_name: int = 24
) -> Table:
    """An empty table: a name, folded where it is long, and columns of numbers."""
    grid = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    grid.add_column("", overflow="fold", max_width=widest_name)
    for name in columns:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def seconds(value: float | None) -> str:
    """Three digits and a unit that fits."""
    if value is None:
        return "-"
    if value and abs(value) < 1.0:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if abs(value) < 1000 else f"{value:.0f} s"
