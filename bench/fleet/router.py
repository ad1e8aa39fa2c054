"""A real `vllm-router` in front of running servers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench.fleet.process import HTTPProcess
from bench.ports import free_ports

#: Its retries stay with the worker that the hash names until the circuit opens, and
#: it makes five attempts: with three failures the fourth one goes elsewhere, and the
#: client sees a pause in place of an error.
SETTINGS = ("--cb-failure-threshold", "3", "--health-check-interval-secs", "5")


class Router(HTTPProcess):
    """One router on a free port; `policy` is one of its `--policy` names."""

    def __init__(
        self,
        worker_urls: Sequence[str],
        policy: str,
        log_path: Path,
        extra_args: Sequence[str] = (),
    ) -> None:
        port, metrics_port = free_ports(2)
        self.worker_urls = tuple(worker_urls)
        self.base_url = f"http://127.0.0.1:{port}"
        command = [
            str(Path(sys.executable).with_name("vllm-router")),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(metrics_port)),
            *("--policy", policy, "--log-level", "warning", *SETTINGS, *extra_args),
            *("--worker-urls", *worker_urls),
        ]
        super().__init__(command, f"{self.base_url}/health", log_path)

    def remove(self, worker_url: str) -> None:
        """Drain: no new request goes there; what runs there goes on."""
        self._change("remove_worker", worker_url)

    def add(self, worker_url: str) -> None:
        self._change("add_worker", worker_url)

    def _change(self, action: str, worker_url: str) -> None:
        answer = httpx.post(
            f"{self.base_url}/{action}", params={"url": worker_url}, timeout=120.0
        )
        answer.raise_for_status()
