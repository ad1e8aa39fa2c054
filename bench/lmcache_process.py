"""A real `lmcache server` as a context manager: start, wait, read, kill, stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from bench.server import ServerError, parse_metrics


class LMCacheProcess(ABC):
    """Runs one server for the length of a ``with`` block."""

    def __init__(self, log_path: Path, start_timeout_s: float) -> None:
        self.log_path = log_path
        self.start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def command(self) -> Sequence[str]:
        """The server's command line."""

    @property
    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """What its environment needs on top of ours."""

    @property
    @abstractmethod
    def base_url(self) -> str:
        """Its HTTP interface."""

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
                env={**os.environ, **self.environment},
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

    def stop(self, grace_s: float = 15.0) -> None:
        """SIGTERM, then SIGKILL to what is left of its group."""
        process = self._process
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        self._signal(signal.SIGKILL)
        self._forget()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._get("/status").json()
        return found

    def metrics(self) -> dict[Any, float]:
        """All samples of `/metrics` now."""
        return parse_metrics(self._get("/metrics").text)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def _get(self, path: str) -> httpx.Response:
        answer = httpx.get(f"{self.base_url}{path}", timeout=30.0)
        return answer.raise_for_status()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _forget(self) -> None:
        if self._process is not None:
            self._process.wait()
            self._process = None

    def _wait_ready(self) -> None:
        process = self._process
        assert process is not None
        deadline = time.monotonic() + self.start_timeout_s
        url = f"{self.base_url}/healthcheck"
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url, timeout=5.0).status_code == 200:
                    return
            time.sleep(0.2)
        tail = "\n".join(self.log().splitlines()[-30:])
        raise ServerError(f"lmcache server did not start:\n{tail}")
