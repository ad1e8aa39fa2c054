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
    window: tokens that a sliding-window layer attends to; local_layers: how many of
        the layers are such.
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
    window: int = 0
    local_layers: int = 0

    @property
    def global_layers(self) -> int:
        return self.layers - self.local_layers

    @property
    def kv_bytes_per_layer(self) -> int:
        """Bytes of K and V of one token in one layer, all GPUs together."""
        return 2 * self.kv_heads * self.head_dim * BYTES_PER_NUMBER

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a context grows by per token: the layers that keep everything."""
        return self.kv_bytes_per_layer * self.global_layers

    def kv_bytes(self, context_tokens: int) -> int:
        """Bytes of a context's KV; window layers hold at most the window.

        Simplification: vLLM would put window layers in a KV cache group of their
        own; here the pool's blocks count the global layers' tokens, and the
        window's constant part costs bandwidth but no block.
        """
        local = min(context_tokens, self.window) * self.local_layers
        layers_tokens = context_tokens * self.global_layers + local
        return layers_tokens * self.kv_bytes_per_layer


_ALL = (
    # meta-llama/Llama-3.1-8B-Instruct: 32 layers, 32 heads, 8 KV heads of 128.
    Model("llama-3.1-8b", 8.03e9, 32, 32, 8, 128, 131_072),
    # meta-llama/Llama-3.1-70B-Instruct: 80 layers, 64 heads, 8 KV heads of 128.
    Model("llama-3.1-70b", 70.6e9, 80, 64, 8, 128, 131_072, tp=4),
    # google/gemma-3-12b-it: 48 layers, 16 heads, 8 KV heads of 256; five of six
    # layers see a window of 1,024 tokens.
    Model("gemma-3-12b", 11.8e9, 48, 16, 8, 256, 131_072, window=1024, local_layers=40),
    # Qwen/Qwen3-32B: 64 layers, 64 heads, 8 KV heads of 128; 131,072 with YaRN.
    Model("qwen3-32b", 32.8e9, 64, 64, 8, 128, 131_072),
)
MODELS: dict[str, Model] = {entry.name: entry for entry in _ALL}
