"""Sizes of the soak, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.command import Folders
from bench.serve.scaled import SWE_BENCH, synthetic
from bench.serve.server import ServerOptions
from bench.stress.soak.agents import ABORT_EXTRA_TOKENS, SHARED_TOKENS
from bench.stress.soak.watch import PROBE_VARIABLE
from ttlcache.cli.command import option
from ttlcache_connector.plugin import SYNC_SCHEDULER
from ttlcache_connector.role.steps import CHECK_INVARIANTS
from ttlcache_sim.load.programs import Program

_PROGRAMS = 240
_MEAN_CONTEXT_TOKENS = 1_200
_MAX_CONTEXT_TOKENS = 4_000
#: Longest tool call.
_GAP_CAP_S = 3.0
MAX_TTL_S = 20.0
#: W of docs/scheduling.md: seconds after which a request is overdue.
MAX_QUEUE_WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class SoakOptions(Folders):
    """How long, how many, and in what pool."""

    minutes: float = option(20.0, "How long the agents run.", min=0.1)
    agents: int = option(64, "Concurrent agents.", min=1)
    blocks: int = option(320, "KV pool, in blocks.", min=160)
    """Of 32 tokens: about eight of the agents' contexts."""
    seed: int = option(0, "Seed of the agents.")
    out: Path = Path("out/soak")

    def server(self) -> ServerOptions:
        """A server with the default policy; references are checked every step."""
        room = _MAX_CONTEXT_TOKENS + SHARED_TOKENS + ABORT_EXTRA_TOKENS
        return ServerOptions(
            num_blocks=self.blocks,
            max_model_len=-(-room // 32) * 32,
            # vLLM's CPU kernels are compiled per shape, and every batch has another
            # one: by default oneDNN keeps 1,024 of about 0.6 MiB each. That hides
            # any leak of ours for hours, and is the same without us.
            extra_env={
                "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
                CHECK_INVARIANTS: "1",
                PROBE_VARIABLE: str(self.probe_path.absolute()),
            },
            extra_args=("--scheduler-cls", SYNC_SCHEDULER),
            kv_transfer_config={
                "kv_connector": "ProbedTTLConnector",
                "kv_connector_module_path": "bench.stress.soak.probe",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "max_ttl_s": MAX_TTL_S,
                    "max_queue_wait_s": MAX_QUEUE_WAIT_S,
                    # Abandoned programs must reach a steady state within minutes.
                    "program_idle_s": 3.0 * MAX_TTL_S,
                },
            },
        )

    @property
    def probe_path(self) -> Path:
        """Where the engine's process writes the MiB of our objects when asked."""
        return self.out / "own_mib.txt"

    def longest_wait_s(self, longest_service_s: float) -> float:
        """Docs/scheduling.md: W + (n + 1) L, where n < agents wait before it."""
        return MAX_QUEUE_WAIT_S + self.agents * longest_service_s

    def workload(self) -> tuple[Program, ...]:
        """Agents take them in this order."""
        share = _MEAN_CONTEXT_TOKENS / SWE_BENCH.tokens.mean
        return synthetic(_PROGRAMS, 1.0, self.seed, share, _GAP_CAP_S)
