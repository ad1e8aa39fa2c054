"""`bench lmcache-tests`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.lmcache.upstream_tests.run import run_tests


def lmcache_tests(
    source: Annotated[
        Path,
        typer.Option(help="An LMCache checkout, or its unpacked source distribution."),
    ],
) -> None:
    """LMCache's own tests, unmodified, against our plugins."""
    raise typer.Exit(run_tests(source, Console()))
