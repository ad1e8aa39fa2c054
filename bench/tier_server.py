"""A real `lmcache server` for benches and tests: start, wait, kill, stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from bench.server import ServerError
from ttlcache_connector.serve_tiers import TierOptions

#: In `/status`: what is on its way to the disk.
_WRITING = ("pending_keys_count", "in_flight_task_count")


class TierServer:
    """One server for the length of a ``with`` block, on free ports."""

    def __init__(
        self, options: TierOptions, log_path: Path, start_timeout_s: float = 120.0
    ) -> None:
        port, http_port, metrics_port = _free_ports(3)
        self.options = replace(
            options, port=port, http_port=http_port, metrics_port=metrics_port
        )
        self.log_path = log_path
        self.start_timeout_s = start_timeout_s
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

    def start(self) -> None:
        """Start, also again after `kill`; on the same ports."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.options.command(),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.options.environment()},
                start_new_session=True,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """SIGKILL, as a crash would end it."""
        self._signal(signal.SIGKILL)
        self._forget()

    def pause(self) -> None:
        """Stop answering without going away."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, then SIGKILL to what is left of its group."""
        process = self._process
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        self._signal(signal.SIGKILL)
        self._forget()

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
                httpx.post(self._url("/cache/clear"), timeout=30.0).raise_for_status()
                if not self.cpu_chunks():
                    return True
            time.sleep(0.1)
        if rested:
            return False
        raise ServerError(f"the CPU tier does not become empty: {self._storage()}")

    def cpu_chunks(self) -> int:
        """Chunks in the CPU tier, those being read or written among them."""
        return int(self._storage()["l1_manager"]["total_object_count"])

    def _storage(self) -> dict[str, Any]:
        answer = httpx.get(self._url("/status"), timeout=30.0).raise_for_status()
        manager: dict[str, Any] = answer.json()["storage_manager"]
        return manager

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.options.http_port}{path}"

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _forget(self) -> None:
        if self._process is not None:
            self._process.wait()
            self._process = None
        self.options.segment.unlink(missing_ok=True)

    def _wait_ready(self) -> None:
        process = self._process
        assert process is not None
        deadline = time.monotonic() + self.start_timeout_s
        url = self._url("/healthcheck")
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url, timeout=5.0).status_code == 200:
                    return
            time.sleep(0.2)
        tail = "\n".join(self.log_path.read_text(errors="replace").splitlines()[-30:])
        raise ServerError(f"lmcache server did not start:\n{tail}")


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
