"""What the loop asks lower tiers: loads that arrive by themselves."""

from __future__ import annotations

from typing import Protocol


class Transfers(Protocol):
    """Loads under way on the links of lower tiers."""

    def next_s(self) -> float | None:
        """When the next load arrives."""
        ...

    def take_arrived(self, now_s: float) -> set[str]:
        """Ids of requests whose load has arrived since the last call."""
        ...


class NoTransfers:
    """No lower tier."""

    def next_s(self) -> float | None:
        return None

    def take_arrived(self, now_s: float) -> set[str]:
        return set()
