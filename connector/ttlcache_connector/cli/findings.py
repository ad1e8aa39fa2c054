"""What `ttlcache doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, BAD = "ok", "note", "BAD"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: BAD means that what was asked about will not work."""

    state: str
    what: str
    text: str
