"""`python -m bench surface`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.surface.extract import missing, reader, surface


def surface_command(
    sources: Annotated[
        list[Path], typer.Argument(help="vLLM wheels, or folders that hold `vllm`.")
    ],
    version: Annotated[
        str | None, typer.Option(help="Of a folder; a wheel names its own.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for vllm-VERSION.json.")] = (
        None
    ),
) -> None:
    """Which of the names that ttlcache relies on a vLLM has, read from its source."""
    console = Console()
    for source in sources:
        named = re.match(r"vllm\w*-([^-]+)-", source.name)
        label = version or (named[1] if named else None)
        if label is None:
            raise typer.BadParameter(f"{source}: say --version")
        found = surface(reader(source))
        lacks = missing(found)
        console.print(f"vLLM {label}: {', '.join(lacks) or 'nothing'} missing")
        if out is not None:
            text = json.dumps({"version": label, "names": found}, indent=1)
            (out / f"vllm-{label}.json").write_text(text + "\n")
