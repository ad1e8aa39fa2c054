"""A helper process with an HTTP health check, as a context manager."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from bench.server import ServerError


class HTTPProcess:
    """Runs `command` until the `with` block ends; ready when `health_url` is 200."""

    def __init__(
        self,
        command: Sequence[str],
        health_url: str,
        log_path: Path,
        start_timeout_s: float = 180.0,
        extra_env: Mapping[str, str] | None = None,
    ) -> None:
        self.command = tuple(command)
        self.log_path = log_path
        self._health_url = health_url
        self._start_timeout_s = start_timeout_s
        self._env = {**os.environ, "NO_COLOR": "1", **(extra_env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM, then SIGKILL to what is left of its group."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self._health_url, timeout=5.0).status_code == 200:
                    return
            time.sleep(0.1)
        tail = "\n".join(
            self.log_path.read_text(errors="replace").splitlines()[-30:],
        )
        raise ServerError(f"{self.command[0]} did not become ready:\n{tail}")
