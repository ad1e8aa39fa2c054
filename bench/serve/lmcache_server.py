"""A real `lmcache server` with our plugins, or with LMCache's own policies alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.serve.ports import free_ports
from bench.serve.process import ServerProcess
from bench.serve.server import parse_metrics

#: The plugins, as docs/lmcache.md gives them.
SERVER_MODULE = "ttlcache_lmcache.server_module"
L2_MODULE = "ttlcache_lmcache.l2_adapter"


@dataclass(frozen=True, slots=True)
class LMCacheOptions:
    """What is asked of `lmcache server`."""

    l1_gb: float
    """CPU memory in GiB."""
    chunk_tokens: int = 128
    eviction_policy: str = "LRU"
    ttl_module: Mapping[str, Any] | None = None
    """Configuration of our server module; None: run without it."""
    l2_adapter: Mapping[str, Any] | None = None

    def arguments(self, port: int, http_port: int) -> list[str]:
        args = [
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--http-host", "127.0.0.1", "--http-port", str(http_port)),
            *("--l1-size-gb", str(self.l1_gb), "--chunk-size", str(self.chunk_tokens)),
            *("--eviction-policy", self.eviction_policy),
            *("--supported-transfer-mode", "auto"),
        ]
        if self.ttl_module is not None:
            spec = {"module_path": SERVER_MODULE, "config": dict(self.ttl_module)}
            args += ["--server-module", json.dumps(spec)]
        if self.l2_adapter is not None:
            args += ["--l2-adapter", json.dumps(dict(self.l2_adapter))]
        return args


def ttl_l2_adapter(**params: Any) -> dict[str, Any]:
    """`--l2-adapter` for our L2 plugin."""
    return {
        "type": "plugin",
        "module_path": L2_MODULE,
        "class_name": "TTLL2Adapter",
        "adapter_params": params,
    }


class LMCacheProcess(ServerProcess):
    """Runs one server for the length of a ``with`` block; it may be killed in there."""

    log_mode = "ab"
    grace_s = 15.0

    def __init__(
        self,
        command: Sequence[str],
        http_port: int,
        log_path: Path,
        env: Mapping[str, str],
    ) -> None:
        self.base_url = f"http://127.0.0.1:{http_port}"
        health_url = f"{self.base_url}/healthcheck"
        super().__init__(command, health_url, log_path, env=env, name="lmcache server")

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


class LMCacheServer(LMCacheProcess):
    """Runs one server for the length of a ``with`` block, on free ports."""

    def __init__(self, options: LMCacheOptions, log_path: Path) -> None:
        self.options = options
        self.port, self.http_port = free_ports(2)
        self.url = f"tcp://127.0.0.1:{self.port}"
        script = str(Path(sys.executable).with_name("lmcache"))
        super().__init__(
            [script, "server", *options.arguments(self.port, self.http_port)],
            self.http_port,
            log_path,
            {"LMCACHE_TRACK_USAGE": "false"},
        )
