"""What came of one seed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One seed's result; `failure` is None when all held."""

    seed: int
    steps: int
    failure: str | None = None
