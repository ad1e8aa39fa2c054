"""A KV connector whose hooks do nothing: what vLLM itself does for any connector."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

NAME = "IdleConnector"


class IdleMetadata(KVConnectorMetadata):
    """Nothing to do."""


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Finds, loads and stores nothing."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return IdleMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        return


def register() -> None:
    """Make the name known to vLLM; idempotent."""
    register_connectors(__name__, {NAME: IdleConnector})


def register_connectors(module: str, classes: Mapping[str, type]) -> None:
    """Make classes of a module known to vLLM by name; twice is no error."""
    for name, cls in classes.items():
        with contextlib.suppress(ValueError):
            KVConnectorFactory.register_connector(name, module, cls.__name__)
