"""Small models with seeded random weights, in shapes that the tiny model lacks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

#: Of every second layer of `window_model`, in tokens.
WINDOW = 64


def window_model(path: Path, tokenizer: Path) -> Path:
    """Gemma 2's layers: two KV cache groups, full attention and a sliding window.

    Args:
        tokenizer: folder of a model with its tokenizer.
    """
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        sliding_window=WINDOW,
        query_pre_attn_scalar=32,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        initializer_range=0.2,
    )
    return _save(Gemma2ForCausalLM, config, torch.float32, path, tokenizer)


#: Of `recurrent_model`: vLLM's CPU kernels of such layers take no other type.
RECURRENT = ("--dtype", "bfloat16", "--mamba-cache-mode", "align")


def recurrent_model(path: Path, tokenizer: Path) -> Path:
    """Qwen3-Next's layers: three groups of states, one of full attention."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=2048,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=128,  # a block of 32 tokens has room for a state
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_range=0.2,
    )
    return _save(Qwen3NextForCausalLM, config, torch.bfloat16, path, tokenizer)


def _save(of: Any, config: Any, dtype: Any, path: Path, tokenizer: Path) -> Path:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = of(config).to(dtype)
    model.save_pretrained(path)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, path)
    return path
