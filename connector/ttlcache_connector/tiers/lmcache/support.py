"""Which models' KV LMCache's lazy offload can hold."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec


def unsupported_reason(kv_cache_config: Any) -> str:
    """Why this model's KV cannot be stored, empty if it can.

    Lazy offload knows a block by its hash and drops every request that has a block
    without one (`LazyOffloadManager.add_store_candidate`, `_drain`). vLLM gives none
    to blocks that the window has passed, nor to states in between.
    """
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", None) or {"": spec}
        for each in specs.values():
            if not isinstance(each, FullAttentionSpec):
                kind = type(each).__name__.removesuffix("Spec")
                return (
                    f"LMCache's lazy offload stores nothing of layers of the kind "
                    f"{kind}; vLLM's --disable-hybrid-kv-cache-manager makes window "
                    "layers full ones"
                )
    return ""
