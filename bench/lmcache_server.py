"""A real `lmcache server` as a context manager: start, wait, read, kill, stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from bench.server import ServerError, parse_metrics

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
    extra_args: tuple[str, ...] = field(default=())

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
        return [*args, *self.extra_args]


def ttl_l2_adapter(**params: Any) -> dict[str, Any]:
    """`--l2-adapter` for our L2 plugin."""
    return {
        "type": "plugin",
        "module_path": L2_MODULE,
        "class_name": "TTLL2Adapter",
        "adapter_params": params,
    }


class LMCacheServer:
    """Runs one server for the length of a ``with`` block, on free ports."""

    def __init__(
        self, options: LMCacheOptions, log_path: Path, start_timeout_s: float = 180.0
    ) -> None:
        self.options = options
        self.log_path = log_path
        self.start_timeout_s = start_timeout_s
        self.port, self.http_port = _free_ports(2)
        self.url = f"tcp://127.0.0.1:{self.port}"
        self.base_url = f"http://127.0.0.1:{self.http_port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def command(self) -> list[str]:
        script = str(Path(sys.executable).with_name("lmcache"))
        return [script, "server", *self.options.arguments(self.port, self.http_port)]

    def start(self) -> None:
        """Start, also again after `kill`; on the same ports.

        Raises:
            ServerError: it did not start; the text ends with its log's tail.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "NO_COLOR": "1"},
                start_new_session=True,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """SIGKILL, as a crash would end it."""
        if self._process is not None:
            self._kill_group(self._process)
            self._process = None

    def stop(self, grace_s: float = 15.0) -> None:
        """SIGTERM, then SIGKILL to what is left of its group."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        self._kill_group(process)

    def status(self) -> dict[str, Any]:
        response = httpx.get(f"{self.base_url}/status", timeout=30.0)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found

    def metrics(self) -> dict[Any, float]:
        """All samples of `/metrics` now."""
        response = httpx.get(f"{self.base_url}/metrics", timeout=30.0)
        response.raise_for_status()
        return parse_metrics(response.text)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @staticmethod
    def _kill_group(process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _wait_ready(self) -> None:
        process = self._process
        assert process is not None
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                url = f"{self.base_url}/healthcheck"
                if httpx.get(url, timeout=5.0).status_code == 200:
                    return
            time.sleep(0.2)
        tail = "\n".join(self.log().splitlines()[-30:])
        raise ServerError(f"lmcache server did not start:\n{tail}")


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
