"""What stands before vLLM servers: a process with a command and a health check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.serve.process import ServerProcess


class HTTPProcess(ServerProcess):
    """Runs `command` until the `with` block ends; ready when `health_url` is 200."""

    def __init__(
        self,
        command: Sequence[str],
        health_url: str,
        log_path: Path,
        start_timeout_s: float = 180.0,
        extra_env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(log_path, start_timeout_s)
        self.name = command[0]
        self._command = tuple(command)
        self._health_url = health_url
        self._extra_env = dict(extra_env or {})

    @property
    def command(self) -> tuple[str, ...]:
        return self._command

    @property
    def health_url(self) -> str:
        return self._health_url

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, **self._extra_env}

    def stop(self, grace_s: float = 5.0) -> None:
        """Streams that clients still read are cut off after a while."""
        super().stop(grace_s)
