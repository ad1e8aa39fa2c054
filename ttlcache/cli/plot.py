"""`ttlcache plot DIR`: four figures of a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ttlcache.cli.common import RecordingPath, fail, read


def plot(
    place: RecordingPath,
    out: Annotated[Path, typer.Option(help="Folder for the PNG files.")] = Path(
        "plots"
    ),
) -> None:
    """Timeline, gaps by tool, pinned memory over time, completion times."""
    recording = read(place)
    try:
        from ttlcache.analysis import timeline
    except ImportError as error:
        fail(f"{error}; pip install 'ttlcache[plot]'")
    console = Console()
    try:
        for path in timeline.draw_all(recording, out):
            console.print(str(path), soft_wrap=True, highlight=False)
    except OSError as error:
        fail(f"{out}: {error.strerror or error}")
