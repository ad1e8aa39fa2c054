"""A real `lmcache server`, whichever command starts it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import httpx

from bench.serve.process import ServerProcess
from bench.serve.server import parse_metrics


class LMCacheProcess(ServerProcess):
    """Runs one server for the length of a ``with`` block; it may be killed in there."""

    name = "lmcache server"
    log_mode = "ab"

    @property
    @abstractmethod
    def base_url(self) -> str:
        """Its HTTP interface."""

    @property
    def health_url(self) -> str:
        return f"{self.base_url}/healthcheck"

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._get("/status").json()
        return found

    def metrics(self) -> dict[Any, float]:
        """All samples of `/metrics` now."""
        return parse_metrics(self._get("/metrics").text)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def _get(self, path: str) -> httpx.Response:
        answer = httpx.get(f"{self.base_url}{path}", timeout=30.0, verify=False)
        return answer.raise_for_status()
