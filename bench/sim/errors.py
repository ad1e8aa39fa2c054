"""What can go wrong in a cell."""

from __future__ import annotations


class SimulationError(RuntimeError):
    """A cell that cannot go on, or broke a conservation law."""
