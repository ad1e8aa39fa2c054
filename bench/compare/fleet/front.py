"""A real `ttlcache front` before a router."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.serve.ports import free_ports
from bench.serve.process import ServerProcess


class Front(ServerProcess):
    """One front on a free port."""

    def __init__(
        self,
        upstream: str,
        log_path: Path,
        extra_args: Sequence[str] = (),
    ) -> None:
        (port,) = free_ports(1)
        self.base_url = f"http://127.0.0.1:{port}"
        command = [
            *(sys.executable, "-m", "ttlcache.cli", "front"),
            *("--upstream", upstream, "--port", str(port)),
            *extra_args,
        ]
        super().__init__(command, f"{self.base_url}/front/health", log_path)
