"""One cell of the transfer bench: vLLM's KV tensors, host chunks, block ids."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from bench.command import one_of
from bench.surface.vllm_moved import find
from ttlcache_connector.copy.kv_layouts import GroupLayout, read_layout

BLOCK_TOKENS = 16
BLOCKS_PER_CHUNK = 16
#: Transfers rotate over so many parts of the pool and of the host memory, so that
#: none finds its bytes in a cache that the one before has filled.
PARTS = 3


@dataclass(frozen=True, slots=True)
class CellShape:
    """What a transfer looks like."""

    layout: str
    """vLLM's name: L layer, B block, N token, H head, C content; outermost first."""
    page_bytes: int
    """One block in one layer."""
    run_blocks: int
    """Adjacent block ids in a row."""
    layers: int
    moved_bytes: int

    @property
    def piece_bytes(self) -> int:
        """Of a block in one piece, where its heads are not apart."""
        return self.page_bytes * (self.layers if self.layout.startswith("BL") else 1)

    @property
    def blocks(self) -> int:
        """Blocks of a transfer: whole chunks."""
        block_bytes = self.layers * self.page_bytes
        chunks = max(1, self.moved_bytes // (block_bytes * BLOCKS_PER_CHUNK))
        return chunks * BLOCKS_PER_CHUNK

    @property
    def num_bytes(self) -> int:
        return self.blocks * self.layers * self.page_bytes


class CellMemory:
    """Both sides of a cell's transfers, and which blocks go where.

    Block ids come in runs of `run_blocks` in random order; every part has its own.
    """

    def __init__(self, shape: CellShape, device: torch.device, seed: int = 0) -> None:
        self.shape, self.device = shape, device
        self.num_blocks = _pool_blocks(shape)
        self.kv_caches, self.config = _allocate(shape, self.num_blocks, device)
        self.group: GroupLayout = read_layout(self.kv_caches, self.config)
        storage = next(iter(self.kv_caches.values())).untyped_storage()
        self.pool = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self.host = torch.zeros(
            PARTS * shape.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        self.parts = _parts(shape, self.num_blocks, seed)

    def chunks(self, part: int) -> list[torch.Tensor]:
        """Chunks of a part as LMCache shapes them: [layer, token, content]."""
        tokens = BLOCKS_PER_CHUNK * BLOCK_TOKENS
        size = self.shape.num_bytes
        flat = self.host[part * size : (part + 1) * size].view(torch.bfloat16)
        return list(flat.view(-1, self.shape.layers, tokens, self._token_items()))

    def straight(self, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As many bytes in one piece on each side: what the peak copies."""
        size = self.shape.num_bytes
        return (
            self.pool[part * size : (part + 1) * size],
            self.host[part * size : (part + 1) * size],
        )

    def randomise(self) -> None:
        """Every 8 bytes of both sides differ from all others: no misplaced copy hides.

        Deterministic; the two sides never share a word.
        """
        for factor, side in ((3, self.pool), (-5, self.host)):
            words = side[: side.numel() // 8 * 8].view(torch.int64)
            torch.arange(1, len(words) + 1, out=words)
            words.mul_(factor * 0x9E3779B97F4A7C1)

    def wipe_blocks(self, part: int) -> None:
        """Zero the blocks of a part, by vLLM's own views."""
        ids = torch.from_numpy(self.parts[part]).to(self.device)
        for cache in self.kv_caches.values():
            cache[ids] = 0

    def _token_items(self) -> int:
        return self.shape.page_bytes // BLOCK_TOKENS // 2


def _pool_blocks(shape: CellShape) -> int:
    """Room for all parts, with a free block after each run."""
    run = min(shape.run_blocks, BLOCKS_PER_CHUNK)
    return (run + 1) * -(-PARTS * shape.blocks // run) + run + 1


def _parts(shape: CellShape, num_blocks: int, seed: int) -> list[npt.NDArray[np.int64]]:
    """Block ids of each part; runs end at chunk borders at the latest."""
    random = np.random.default_rng(seed)
    run = min(shape.run_blocks, BLOCKS_PER_CHUNK)
    # A free block after each run, so that neighbours never join by chance.
    starts = np.arange(0, num_blocks - run, run + 1)
    random.shuffle(starts)
    ids = (starts[:, None] + np.arange(run)).ravel()
    return [
        ids[part * shape.blocks : (part + 1) * shape.blocks] for part in range(PARTS)
    ]


def _allocate(
    shape: CellShape, num_blocks: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], object]:
    """KV tensors as vLLM allocates them for a dense model of such pages."""
    heads, head_size = _heads(shape.page_bytes)
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=torch.bfloat16,
    )
    assert spec.page_size_bytes == shape.page_bytes
    layout = KVCacheLayout[shape.layout]
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        num_gpu_blocks_override=num_blocks,
        prefix_cache_retention_interval=None,
    )
    vllm_config = SimpleNamespace(
        cache_config=cache_config,
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    group = KVCacheGroupSpec([f"layers.{i}" for i in range(shape.layers)], spec)
    configure = find("get_kv_cache_config_from_groups")
    config = configure(cast(Any, vllm_config), [group], 1 << 40)
    config.kv_cache_layout = layout.name
    return allocate_kv_cache(config, device, layout), config


def _heads(page_bytes: int) -> tuple[int, int]:
    """KV heads and head size of such pages; the head size is 128 where it fits."""
    bytes_per_item = BLOCK_TOKENS * 2 * 2  # tokens, K and V, bfloat16
    items, rest = divmod(page_bytes, bytes_per_item)
    for head_size in (128, 64, 32, 16, 8):
        if not rest and items and items % head_size == 0:
            return items // head_size, head_size
    raise ValueError(
        f"no model has pages of {page_bytes} bytes: expected a multiple of "
        f"{8 * bytes_per_item}"
    )


def all_shapes(
    layouts: tuple[str, ...],
    pages: tuple[int, ...],
    runs: tuple[int, ...],
    layers: int,
    moved_bytes: int,
) -> list[CellShape]:
    """Every combination, layouts outermost.

    Raises:
        ValueError: a layout that vLLM does not know.
    """
    for layout in layouts:
        one_of("layout", layout, KVCacheLayout.__members__)
    return [
        CellShape(layout, page, run, layers, moved_bytes)
        for layout, page, run in itertools.product(layouts, pages, runs)
    ]
