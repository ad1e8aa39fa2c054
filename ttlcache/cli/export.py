"""`ttlcache export DIR`: a recording for other people's tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ttlcache.analysis import continuum_format, perfetto
from ttlcache.cli.common import RecordingPath, fail, read, write_json


def export(
    place: RecordingPath,
    to_perfetto: Annotated[
        Path | None,
        typer.Option("--perfetto", help="Trace-event JSON for ui.perfetto.dev."),
    ] = None,
    to_continuum: Annotated[
        Path | None,
        typer.Option("--continuum", help="vllm-continuum's scheduler_timestamps."),
    ] = None,
) -> None:
    """Write a recording in another format."""
    if to_perfetto is None and to_continuum is None:
        fail("say where to: --perfetto FILE or --continuum FILE")
    recording = read(place)
    console = Console()
    for path, content in (
        (to_perfetto, perfetto.export),
        (to_continuum, continuum_format.export),
    ):
        if path is not None:
            write_json(path, content(recording), indent=None)  # for machines
            console.print(str(path), soft_wrap=True, highlight=False)
