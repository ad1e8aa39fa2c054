"""`ttlcache serve-tiers`: an LMCache server with the settings that agents need.

It only builds a command line; LMCache itself runs in the process that it starts.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlcache.cli.command import argument, option

#: LMCache ships no `python -m` entry of its own.
_RUN = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; main()"


#: On disk, what nobody used for so long is removed, whatever room there is.
DISK_TTL_S = 30 * 86_400.0
#: Size of the disk tier where none is given.
DISK_GB = 100.0
#: Seconds for which a context that was found stays in place while its request queues.
HOLD_READS_S = 1800


def _reached_at(host: str) -> str:
    """Where this machine finds a server that listens on all of its addresses."""
    return "127.0.0.1" if host in ("0.0.0.0", "*") else host


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What the tiers are to hold (GB of 1e9 bytes), and where the server listens."""

    cpu_gb: float = option(20.0, "CPU memory for KV, in GB.", min=0.01, max=1e9)
    disk: Path | None = option(None, "Folder of the disk tier; none by default.")
    disk_gb: float | None = option(
        None, f"Size of the disk tier, in GB ({DISK_GB:g}).", min=0.01, max=1e9
    )
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(5555, "Port for vLLM.", min=1, max=65535)
    http_host: str = option(
        "127.0.0.1",
        "Address of LMCache's own HTTP interface: /metrics, /healthcheck, and "
        "administration without a password.",
    )
    http_port: int = option(8090, "Port of that interface.", min=1, max=65535)
    chunk_tokens: int = option(
        256, "Smallest unit stored; a multiple of vLLM's block.", min=1
    )
    retention: bool = option(
        False,
        "Evict from CPU memory by program, as told by the connector, not by "
        "LMCache's LRU.",
        "--retention",
    )
    allow_untested: bool = option(
        False, "Run on versions that were not tested together.", "--allow-untested"
    )
    print_only: bool = option(
        False, "Print both command lines and end.", "--print-only"
    )
    server_args: list[str] | None = argument("More arguments for lmcache server.", None)

    @property
    def shm_name(self) -> str:
        """Shared memory through which the workers copy."""
        return f"ttlcache_{self.port}"

    @property
    def segment(self) -> Path:
        """Its file; a server that was killed leaves it behind."""
        return Path("/dev/shm", f"lmcache_l1_pool_{self.shm_name}")

    def command(self) -> list[str]:
        """The server's command line."""
        args = [
            *(sys.executable, "-c", _RUN, "server"),
            *("--host", self.host, "--port", str(self.port)),
            # Its metrics are here, too: `lmcache server` heeds no --prometheus-port.
            *("--http-host", self.http_host, "--http-port", str(self.http_port)),
            *("--l1-size-gb", f"{self.cpu_gb * 1e9 / 2**30:.6g}"),  # GiB, that is
            *("--chunk-size", str(self.chunk_tokens)),
            *("--eviction-policy", "LRU"),
            # LMCache's default refuses workers that copy by themselves, and lets
            # them wait for five minutes before they say so.
            *("--supported-transfer-mode", "auto"),
            *("--shm-name", self.shm_name),
            # Beside a GPU LMCache lets pinned memory grow by default, and then
            # shares none of it, whatever its name.
            "--no-l1-use-lazy",
            *("--max-workers", "4"),
            # What came up from disk for a turn is asked for again by the next one.
            *("--l2-prefetch-policy", "retain"),
            *("--l1-read-ttl-seconds", str(HOLD_READS_S)),
            # Of a store that was given up: until then a prefix ends at its chunks.
            *("--l1-write-ttl-seconds", "300"),
            *("--session-ttl-seconds", str(HOLD_READS_S)),
        ]
        if self.disk is not None:
            args += ["--l2-adapter", json.dumps(self._disk_adapter())]
        for module in self._modules():
            args += ["--server-module", json.dumps(module)]
        return [*args, *(self.server_args or ())]

    def environment(self) -> dict[str, str]:
        """What the server's environment needs on top of ours."""
        return {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}

    def connector_config(self) -> dict[str, Any]:
        """The matching `kv_connector_extra_config`."""
        return {
            "lower_tier": "lmcache",
            "lmcache.mp.host": f"tcp://{_reached_at(self.host)}",
            "lmcache.mp.port": self.port,
        }

    def vllm_flag(self) -> str:
        """The matching flag of `vllm serve`, for a shell."""
        transfer = {
            "kv_connector": "TTLConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": self.connector_config(),
        }
        return f"--kv-transfer-config '{json.dumps(transfer)}'"

    def _modules(self) -> list[dict[str, Any]]:
        found = [{"module_path": "ttlcache_connector.lmcache_module", "config": {}}]
        if self.retention:
            own = {"allow_untested_lmcache": self.allow_untested}
            found += [{"module_path": "ttlcache_lmcache.server_module", "config": own}]
        return found

    def _disk_adapter(self) -> dict[str, Any]:
        """Ours: LMCache's own disk tiers give back whatever the file holds by then."""
        return {
            "type": "plugin",
            "module_path": "ttlcache_lmcache.l2_adapter",
            "class_name": "TTLL2Adapter",
            "adapter_params": {
                "path": str(self.disk),
                "disk_bytes": round((self.disk_gb or DISK_GB) * 1e9),
                "disk_ttl_s": DISK_TTL_S,
                "allow_untested_lmcache": self.allow_untested,
            },
        }
