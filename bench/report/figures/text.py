"""Markdown of the figures' pages."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first column is text."""
    align = ["---", *("--:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, align, *rows])
