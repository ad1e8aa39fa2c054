"""A real `vllm-router` in front of running servers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench.serve.ports import free_ports
from bench.serve.process import ServerProcess

#: Its retries stay with the worker that the policy names until the circuit opens, and
#: it makes five attempts: with three failures the fourth one goes elsewhere, and the
#: client sees a pause in place of an error.
SETTINGS = ("--cb-failure-threshold", "3", "--health-check-interval-secs", "5")
#: Seconds that `sticky_least_loaded` counts a program among its replica's after its
#: last request. With the default of two hours a replica that joins is sent every new
#: program until it has as many as the others had in two hours.
STICKY_IDLE = {"VLLM_ROUTER_SLL_SESSION_EXPIRATION_IN_S": "600"}


class Router(ServerProcess):
    """One router on a free port; `policy` is one of its `--policy` names."""

    def __init__(
        self,
        worker_urls: Sequence[str],
        policy: str,
        log_path: Path,
    ) -> None:
        port, metrics_port = free_ports(2)
        self.base_url = f"http://127.0.0.1:{port}"
        command = [
            str(Path(sys.executable).with_name("vllm-router")),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(metrics_port)),
            *("--policy", policy, "--log-level", "warning", *SETTINGS),
            *("--worker-urls", *worker_urls),
        ]
        health_url = f"{self.base_url}/health"
        super().__init__(command, health_url, log_path, env=STICKY_IDLE)

    def add(self, worker_url: str) -> None:
        answer = httpx.post(
            f"{self.base_url}/add_worker", params={"url": worker_url}, timeout=120.0
        )
        answer.raise_for_status()
