"""vLLM replicas that share one LMCache server: started together, killed one by one."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.serve.server import ServerOptions, VLLMServer
from bench.serve.tier_server import TierServer
from ttlcache_connector.lmcache_server.launch import TierOptions

#: Tokens of one chunk below: a block of the servers, so that no tail is lost.
CHUNK_TOKENS = 32


class Cluster:
    """Replicas and their shared tier for the length of a `with` block.

    Args:
        model: folder with weights and tokenizer.
        options: the same of every replica, without `kv_transfer_config`.
        replicas: how many.
        config: `kv_connector_extra_config` of every replica.
        tier_gb: CPU memory of the shared LMCache server; None: no lower tier.
        folder: where logs go.
    """

    def __init__(
        self,
        model: Path,
        options: ServerOptions,
        replicas: int,
        config: Mapping[str, Any],
        tier_gb: float | None,
        folder: Path,
    ) -> None:
        self.replicas: tuple[VLLMServer, ...] = ()
        self.killed: set[int] = set()
        self._model = model
        self._options = options
        self._num_replicas = replicas
        self._config = dict(config)
        self._tier_gb = tier_gb
        self._folder = folder
        self._stack = ExitStack()

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.base_url for server in self.replicas)

    @property
    def living(self) -> tuple[VLLMServer, ...]:
        """Replicas that were not killed."""
        return tuple(s for i, s in enumerate(self.replicas) if i not in self.killed)

    def __enter__(self) -> Self:
        try:
            self.tiers = self._start_tiers()
            self.replicas = tuple(
                VLLMServer(
                    self._model,
                    self._replica_options(index),
                    self._folder / f"replica-{index}.log",
                )
                for index in range(self._num_replicas)
            )
            with ThreadPoolExecutor(self._num_replicas) as pool:
                list(pool.map(self._stack.enter_context, self.replicas))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def kill(self, index: int) -> None:
        """SIGKILL one replica."""
        self.killed.add(index)
        self.replicas[index].kill()

    def _start_tiers(self) -> TierServer | None:
        if self._tier_gb is None:
            return None
        options = TierOptions(cpu_gb=self._tier_gb, chunk_tokens=CHUNK_TOKENS)
        server = TierServer(options, self._folder / "lmcache.log")
        return self._stack.enter_context(server)

    def _replica_options(self, index: int) -> ServerOptions:
        config = self._config
        if self.tiers is not None:
            config = {**self.tiers.options.connector_config(), **config}
        transfer = {
            "kv_connector": "TTLConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": config,
        }
        # Answers carry the first name: they tell which replica gave them.
        names = ("--served-model-name", f"replica-{index}", "tiny")
        return replace(
            self._options,
            kv_transfer_config=transfer,
            extra_args=(*self._options.extra_args, *names),
        )
