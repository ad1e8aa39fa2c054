"""Models that a cell can serve. Adding one: one entry in `MODELS`.

Sizes are those of the published `config.json` on Hugging Face; weights and KV are
bf16, 2 bytes a number.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_NUMBER = 2


@dataclass(frozen=True, slots=True)
class Model:
    """What a step costs depends on.

    params: all of them; heads: query heads; tp: GPUs that share a layer.
    max_tokens: longest context.
    """

    name: str
    params: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_tokens: int
    tp: int = 1

    @property
    def kv_bytes_per_layer(self) -> int:
        """Bytes of K and V of one token in one layer, all GPUs together."""
        return 2 * self.kv_heads * self.head_dim * BYTES_PER_NUMBER

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a context grows by per token."""
        return self.kv_bytes_per_layer * self.layers


_ALL = (
    # meta-llama/Llama-3.1-8B-Instruct: 32 layers, 32 heads, 8 KV heads of 128.
    Model("llama-3.1-8b", 8.03e9, 32, 32, 8, 128, 131_072),
    # meta-llama/Llama-3.1-70B-Instruct: 80 layers, 64 heads, 8 KV heads of 128.
    Model("llama-3.1-70b", 70.6e9, 80, 64, 8, 128, 131_072, tp=4),
    # Qwen/Qwen3-32B: 64 layers, 64 heads, 8 KV heads of 128; 131,072 with YaRN.
    Model("qwen3-32b", 32.8e9, 64, 64, 8, 128, 131_072),
)
MODELS: dict[str, Model] = {entry.name: entry for entry in _ALL}
