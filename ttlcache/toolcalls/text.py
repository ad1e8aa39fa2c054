"""Small text tools of the tool-call parsers."""

from __future__ import annotations

from ttlcache.types import KEY_PART_LIMIT


def words(text: str) -> frozenset[str]:
    """The words of a table."""
    return frozenset(text.split())


def clean(part: str) -> str:
    """`part` of a key: bounded, and printable without spaces.

    Keys become dictionary keys and metric labels, and models write them.
    """
    part = part[: 4 * KEY_PART_LIMIT].strip()[:KEY_PART_LIMIT]
    if part.isascii() and part.isprintable() and " " not in part:
        return part
    spaced = "_".join(part.split())
    return "".join(char for char in spaced if char.isprintable())
