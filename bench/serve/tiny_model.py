"""A tiny Llama with seeded random weights and its tokenizer, made without a download.

The weights are drawn with a wide ``initializer_range`` so that the logits are far
apart: greedy tokens then depend on the content of the KV cache (a corrupted block
changes them), and hardly ever on the rounding of a differently batched sum.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FINGERPRINT_FILE = "fingerprint.json"
#: Raise when the way a model is made changes, so that old folders are rebuilt.
RECIPE_VERSION = 1
#: Tokens that the tokenizer learns; a larger vocabulary is filled up.
_LEARNT_TOKENS = 2048

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_SPECIAL_TOKENS = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")

_ONSETS = ("b", "br", "c", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "st", "t")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou")
_CALLS = ("cd", "ls -la", "grep -rn", "cat", "sed -n", "python -m pytest", "git diff")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama; its head size must be one that vLLM's backend knows (32)."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 512
    vocab: int = 2048
    max_position: int = 32768
    initializer_range: float = 0.3
    has_weights: bool = True
    """False: for vLLM's ``--load-format dummy``, in bfloat16."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V per token, in float32 where there are weights."""
        number_bytes = 4 if self.has_weights else 2
        head_bytes = self.hidden // self.heads * number_bytes
        return 2 * self.layers * self.kv_heads * head_bytes


DEFAULT_SHAPE = ModelShape()
#: Llama-3.1-8B's.
LLAMA_8B = ModelShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    intermediate=14336,
    vocab=128_256,
    max_position=131_072,
    has_weights=False,
)


def build(path: Path, seed: int = 0, shape: ModelShape = DEFAULT_SHAPE) -> Path:
    """Make the model folder at ``path``; reuse it when it was made the same way.

    Args:
        path: folder to write; replaced when it holds another model of ours, refused
            when it holds anything else.
        seed: torch seed of the weights and seed of the tokenizer's training text.
        shape: sizes of the model.

    Returns:
        ``path``.

    Raises:
        FileExistsError: ``path`` is a non-empty folder that was not made here.
    """
    marker = path / FINGERPRINT_FILE
    if marker.is_file():
        if json.loads(marker.read_text()) == _fingerprint(path, seed, shape):
            return path
        shutil.rmtree(path)
    elif path.exists() and any(path.iterdir()):
        raise FileExistsError(
            f"{path} is not empty and was not made by bench.serve.tiny_model: "
            "name another folder or remove it"
        )
    path.mkdir(parents=True, exist_ok=True)
    _write_weights(path, seed, shape)
    _write_tokenizer(path, seed, shape)
    marker.write_text(json.dumps(_fingerprint(path, seed, shape), indent=1))
    return path


def _fingerprint(path: Path, seed: int, shape: ModelShape) -> dict[str, Any]:
    """The recipe and a digest of every file, so that a damaged folder is rebuilt."""
    files = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.iterdir())
        if file.is_file() and file.name != FINGERPRINT_FILE
    }
    return {
        "recipe": RECIPE_VERSION,
        "seed": seed,
        "shape": asdict(shape),
        "files": files,
    }


def _write_weights(path: Path, seed: int, shape: ModelShape) -> None:
    # Heavy, and needed only when the folder is made.
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=shape.max_position,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    if not shape.has_weights:
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(path)
        return
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        model = model.to(torch.float32)
    finally:
        torch.random.set_rng_state(state)
    model.save_pretrained(path, safe_serialization=True)


def _write_tokenizer(path: Path, seed: int, shape: ModelShape) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_LEARNT_TOKENS,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(seed), trainer)
    if (learnt := tokenizer.get_vocab_size()) != _LEARNT_TOKENS:
        raise RuntimeError(f"tokenizer has {learnt} tokens, expected {_LEARNT_TOKENS}")
    described = json.loads(tokenizer.to_str())
    fillers = range(_LEARNT_TOKENS, shape.vocab)
    described["model"]["vocab"] |= {f"<unused-{i}>": i for i in fillers}
    text = json.dumps(described, ensure_ascii=False)
    (path / "tokenizer.json").write_text(text)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL_TOKENS[0],
        "eos_token": _SPECIAL_TOKENS[1],
        "pad_token": _SPECIAL_TOKENS[1],
        "model_max_length": shape.max_position,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _training_text(seed: int, num_lines: int = 4000) -> list[str]:
    """Lines of made-up words and shell commands: enough for 2,048 merges."""
    rng = random.Random(seed)
    words = [
        "".join(
            rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 4))
        )
        for _ in range(2500)
    ]
    lines = []
    for _ in range(num_lines):
        sentence = " ".join(rng.choices(words, k=rng.randint(4, 12)))
        command = rng.choice(_CALLS)
        lines.append(f"{sentence}.\n```bash\n{command} {rng.choice(words)}.py\n```\n")
    return lines
