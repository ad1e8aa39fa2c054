"""Servers that went away and came back while nobody asked."""

from __future__ import annotations

from typing import Any


class Recoveries:
    """Heard from LMCache's heartbeats, which begin with the first lookup."""

    def __init__(self, adapter: Any) -> None:
        """
        Args:
            adapter: LMCache's, of the scheduler.
        """
        self._adapter = adapter
        self._heard = False

    def any_since_asked(self) -> bool:
        """Whether any server recovered since the last call."""
        for heartbeat in (self._adapter._heartbeats or {}).values():  # noqa: SLF001
            heartbeat.register_recover_callback(self._hear)
        heard, self._heard = self._heard, False
        return heard

    def _hear(self) -> bool:
        """On the heartbeat's thread, before LMCache calls the server healthy."""
        self._heard = True
        return True
