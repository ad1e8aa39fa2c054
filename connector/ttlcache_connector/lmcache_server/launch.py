"""`ttlcache serve-tiers`: an LMCache server with the settings that agents need.

It only builds a command line; LMCache itself runs in the process that it starts.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: LMCache ships no `python -m` entry of its own.
_RUN = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; main()"


#: On disk, what nobody used for so long is removed, whatever room there is.
DISK_TTL_S = 30 * 86_400.0
#: As many store, as many load. LMCache's have 4, which digest nothing.
DISK_THREADS = 8


def _reached_at(host: str) -> str:
    """Where this machine finds a server that listens on all of its addresses."""
    return "127.0.0.1" if host in ("0.0.0.0", "*") else host


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What the tiers are to hold (GB of 1e9 bytes), and where the server listens."""

    cpu_gb: float = 20.0
    disk: Path | None = None
    """Folder of the disk tier, None for no disk tier."""
    disk_gb: float = 100.0
    host: str = "127.0.0.1"
    port: int = 5555
    http_host: str = "127.0.0.1"
    """LMCache's HTTP interface administers it and asks nobody for a key."""
    http_port: int = 8090
    chunk_tokens: int = 256
    """Smallest unit that is stored; a multiple of vLLM's block size."""
    hold_reads_s: int = 1800
    """How long a found context stays where it is while its request queues."""
    retention: bool = False
    """Deadlines and programs decide what leaves CPU memory, not LMCache's LRU."""
    allow_untested: bool = False
    """Run on an LMCache that was not tested."""
    extra: tuple[str, ...] = ()

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
            *("--l1-read-ttl-seconds", str(self.hold_reads_s)),
            # Of a store that was given up: until then a prefix ends at its chunks.
            *("--l1-write-ttl-seconds", "300"),
            *("--session-ttl-seconds", str(self.hold_reads_s)),
        ]
        if self.disk is not None:
            args += ["--l2-adapter", json.dumps(self._disk_adapter())]
        for module in self._modules():
            args += ["--server-module", json.dumps(module)]
        return [*args, *self.extra]

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
            config = {"allow_untested_lmcache": self.allow_untested}
            path = "ttlcache_lmcache.server_module"
            found.append({"module_path": path, "config": config})
        return found

    def _disk_adapter(self) -> dict[str, Any]:
        """Ours: LMCache's own disk tiers give back whatever the file holds by then."""
        return {
            "type": "plugin",
            "module_path": "ttlcache_lmcache.l2_adapter",
            "class_name": "TTLL2Adapter",
            "adapter_params": {
                "path": str(self.disk),
                "disk_bytes": round(self.disk_gb * 1e9),
                "disk_ttl_s": DISK_TTL_S,
                "num_threads": DISK_THREADS,
                "allow_untested_lmcache": self.allow_untested,
            },
        }
