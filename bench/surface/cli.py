"""`python -m bench surface`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.command import argument, option, write_json
from bench.surface.extract import missing, reader, surface


@dataclass(frozen=True, slots=True)
class SurfaceOptions:
    """Sources of vLLM, and where what they have is written."""

    sources: list[Path] = argument("vLLM wheels, or folders that hold `vllm`.")
    version: str | None = option(None, "Of a folder; a wheel names its own.")
    out: Path | None = option(None, "Folder for vllm-VERSION.json.")


def read_surface(options: SurfaceOptions, console: Console) -> None:
    """Which of the names that ttlcache relies on a vLLM has, read from its source."""
    for source in options.sources:
        named = re.match(r"vllm\w*-([^-]+)-", source.name)
        label = options.version or (named[1] if named else None)
        if label is None:
            raise ValueError(f"{source}: say --version")
        found = surface(reader(source))
        lacks = missing(found)
        console.print(f"vLLM {label}: {', '.join(lacks) or 'nothing'} missing")
        if options.out is not None:
            value = {"version": label, "names": found}
            write_json(options.out / f"vllm-{label}.json", value)
