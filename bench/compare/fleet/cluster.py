"""vLLM replicas that share one LMCache server: started together, killed one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.compare.agents import CONNECTOR
from bench.serve.server import ServerOptions, VLLMServer
from bench.serve.tier_server import TierServer
from ttlcache_connector.lmcache_server.launch import TierOptions

#: Tokens of one chunk below: a block of the servers, so that no tail is lost.
CHUNK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Cluster:
    """Replicas that were started, and their shared tier."""

    replicas: tuple[VLLMServer, ...]
    tiers: TierServer | None
    killed: set[int] = field(default_factory=set)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.base_url for server in self.replicas)

    @property
    def living(self) -> tuple[VLLMServer, ...]:
        """Replicas that were not killed."""
        return tuple(s for i, s in enumerate(self.replicas) if i not in self.killed)

    def kill(self, index: int) -> None:
        """SIGKILL one replica."""
        self.killed.add(index)
        self.replicas[index].kill()


@contextmanager
def started(
    model: Path,
    options: ServerOptions,
    replicas: int,
    config: Mapping[str, Any],
    tier_gb: float | None,
    folder: Path,
) -> Iterator[Cluster]:
    """A cluster for the length of a `with` block.

    Args:
        model: folder with weights and tokenizer.
        options: the same of every replica, without `kv_transfer_config`.
        replicas: how many.
        config: `kv_connector_extra_config` of every replica.
        tier_gb: CPU memory of the shared LMCache server; None: no lower tier.
        folder: where logs go.
    """
    with ExitStack() as stack:
        tiers = None
        if tier_gb is not None:
            below = TierOptions(cpu_gb=tier_gb, chunk_tokens=CHUNK_TOKENS)
            tiers = stack.enter_context(TierServer(below, folder / "lmcache.log"))
            config = {**tiers.options.connector_config(), **config}
        transfer = {**CONNECTOR, "kv_connector_extra_config": dict(config)}
        servers = []
        for index in range(replicas):
            # Answers carry the first name: they tell which replica gave them.
            names = ("--served-model-name", f"replica-{index}", "tiny")
            own = replace(
                options,
                kv_transfer_config=transfer,
                extra_args=(*options.extra_args, *names),
            )
            servers.append(VLLMServer(model, own, folder / f"replica-{index}.log"))
        with ThreadPoolExecutor(replicas) as pool:
            list(pool.map(stack.enter_context, servers))
        yield Cluster(tuple(servers), tiers)
