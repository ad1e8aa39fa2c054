"""What `ttlcache serve-tiers` runs, for benches and tests."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from bench.serve.lmcache_server import LMCacheProcess
from bench.serve.ports import free_ports
from bench.serve.process import ServerError
from ttlcache_connector.lmcache_server.launch import TierOptions

#: In `/status`: what is on its way to the disk.
_WRITING = ("pending_keys_count", "in_flight_task_count")


class TierServer(LMCacheProcess):
    """One server for the length of a ``with`` block, on free ports."""

    def __init__(self, options: TierOptions, log_path: Path) -> None:
        port, http_port = free_ports(2)
        self.options = replace(options, port=port, http_port=http_port)
        command, env = self.options.command(), self.options.environment()
        super().__init__(command, http_port, log_path, env)

    def pause(self) -> None:
        """Stop answering without going away."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def clear_cpu(self, timeout_s: float = 60.0) -> bool:
        """Empty the CPU tier once all that it holds is on disk.

        Returns:
            False where something stays: after an outage the server keeps what a
            lookup had found locked for a reader who gave up.

        Raises:
            ServerError: something is still being written after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        rested = 0
        while time.monotonic() < deadline:
            status = self._storage()
            busy = status["store_controller"]
            rested = 0 if any(busy[name] for name in _WRITING) else rested + 1
            # What was stored a moment ago is not queued for the disk yet.
            if rested >= 3:
                self._clear()
                if not self.cpu_chunks():
                    return True
            time.sleep(0.1)
        if rested:
            return False
        raise ServerError(f"the CPU tier does not become empty: {self._storage()}")

    def cpu_chunks(self) -> int:
        """Chunks in the CPU tier, those being read or written among them."""
        return int(self._storage()["l1_manager"]["total_object_count"])

    def _clear(self) -> None:
        url = f"{self.base_url}/cache/clear"
        httpx.post(url, timeout=30.0, verify=False).raise_for_status()

    def _storage(self) -> dict[str, Any]:
        manager: dict[str, Any] = self.status()["storage_manager"]
        return manager

    def kill(self) -> None:
        super().kill()
        self.options.segment.unlink(missing_ok=True)
