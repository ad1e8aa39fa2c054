"""`ttlcache export DIR`: a recording for ui.perfetto.dev."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ttlcache.analysis import perfetto
from ttlcache.cli.common import RecordingPath, read, write_json


def export(
    place: RecordingPath,
    to_perfetto: Annotated[
        Path, typer.Option("--perfetto", help="Trace-event JSON for ui.perfetto.dev.")
    ],
) -> None:
    """Write a recording in another format."""
    write_json(to_perfetto, perfetto.export(read(place)), indent=None)  # for machines
    Console().print(str(to_perfetto), soft_wrap=True, highlight=False)
