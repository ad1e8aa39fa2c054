"""Commands of our programs, run in this process."""

from __future__ import annotations

import typer
from typer.testing import CliRunner


def output_of(app: typer.Typer, *words: object, status: int = 0) -> str:
    """What a command prints, on lines of 400 columns; it must end with `status`."""
    runner = CliRunner(env={"COLUMNS": "400"})
    done = runner.invoke(app, [str(word) for word in words])
    assert done.exit_code == status, done.output
    return done.output
