"""A server process as a context manager: start, wait until healthy, stop, kill."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

_LOG_TAIL_LINES = 40
#: "ValueError: …" or "ttlcache.errors.ConfigError: …", with or without a prefix.
_CAUSE_LINE = re.compile(r"(?:^|\] )[\w.]*(?:Error|Exception): ")


#: Signals by which users and their tools end a bench.
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Set once such a signal came: threads that wait for a server give up.
_is_ending = threading.Event()


def stop_servers_on_signals() -> None:
    """From now on a signal leaves all `with` blocks, which stop their servers.

    Further signals are ignored then, so that none interrupts the stopping.
    """

    def leave(number: int, frame: object) -> None:
        for each in _END_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        _is_ending.set()
        raise SystemExit(128 + number)

    for number in _END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets SIGHUP
            signal.signal(number, leave)


class ServerError(RuntimeError):
    """A server did not start, or died; the message ends with its log's tail."""


class ServerProcess:
    """Runs `command` for the length of a ``with`` block.

    Args:
        command: the full command line.
        health_url: answers 200 once the server is ready.
        log_path: file that gets its stdout and stderr.
        start_timeout_s: deadline for `health_url` to answer 200; a machine that is
            busy for minutes must not cost a measurement.
        env: what its environment needs on top of ours.
        name: what error messages call it.
    """

    #: How a further start opens the log: "ab" keeps what the one before wrote.
    log_mode = "wb"
    #: Seconds after SIGTERM in which streams that clients still read may end.
    grace_s = 5.0

    def __init__(
        self,
        command: Sequence[str],
        health_url: str,
        log_path: Path,
        start_timeout_s: float = 600.0,
        env: Mapping[str, str] | None = None,
        name: str = "",
    ) -> None:
        self.command = tuple(command)
        self.health_url = health_url
        self.log_path = log_path
        self.start_timeout_s = start_timeout_s
        self.name = name or command[0]
        self._env = {"NO_COLOR": "1", **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process that was started; others may be children of it."""
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    def thread_seconds(self) -> dict[str, tuple[float, float]]:
        """By thread of all its processes: seconds it ran, and waited for a core."""
        tree = [self.pid, *(c.pid for c in psutil.Process(self.pid).children(True))]
        found = {}
        for pid in tree:
            for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    ran_ns, waited_ns, _ = map(int, path.read_text().split())
                    found[path.parent.name] = ran_ns / 1e9, waited_ns / 1e9
        return found

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
        """Start, also again after `kill` or `stop`; on the same ports.

        Raises:
            ServerError: it did not become healthy.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open(self.log_mode) as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env},
                start_new_session=True,
            )
        try:
            self._wait_healthy(self._process)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """SIGTERM to the server, then SIGKILL to what is left of its group."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self.grace_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group, as a crash of the machine would end it."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def log_tail(self) -> str:
        """The exceptions named in the log and its last lines, for error messages."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        causes = dict.fromkeys(line for line in lines if _CAUSE_LINE.search(line))
        tail = lines[-_LOG_TAIL_LINES:]
        return "\n".join([*(line for line in causes if line not in tail), "…", *tail])

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _wait_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            code = process.poll()
            if code is not None:
                raise ServerError(
                    f"{self.name} ended with exit status {code} before it was "
                    f"ready; {self.log_path} ends with:\n{self.log_tail()}"
                )
            with contextlib.suppress(httpx.TransportError):
                # Unverified, for plain HTTP: else every call reads all certificates,
                # which is 30 ms of CPU, as long as the server is starting.
                answer = httpx.get(self.health_url, timeout=5.0, verify=False)
                if answer.status_code == 200:
                    return
            if _is_ending.wait(0.2):
                raise ServerError(f"{self.name} was stopped by a signal")
        raise ServerError(
            f"{self.name} was not ready after {self.start_timeout_s:g} s; "
            f"{self.log_path} ends with:\n{self.log_tail()}"
        )
