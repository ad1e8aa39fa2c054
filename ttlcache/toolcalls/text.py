"""Small text tools of the tool-call parsers."""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    """The words of a table."""
    return frozenset(text.split())
