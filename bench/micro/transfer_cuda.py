"""Our CUDA methods one by one, and vLLM's and LMCache's copies on a CUDA device."""

from __future__ import annotations

from typing import Any

import torch

from bench.micro.transfer_arm import (
    Absent,
    Arm,
    EngineArm,
    Unsupported,
    plan_of,
)
from bench.micro.transfer_memory import BLOCKS_PER_CHUNK, CellMemory
from ttlcache.transfer import Direction
from ttlcache.transfer.calibrate import CANDIDATES
from ttlcache.transfer.cupy_engine import CupyEngine
from ttlcache.transfer.cupy_runtime import CupyRuntime
from ttlcache.transfer.host_memory import PinnedRanges
from ttlcache_connector.copy.lanes import Lanes, make_lanes


class SwapBlocksArm(Arm):
    """vLLM's batch copy: one descriptor a block and layer, as its offloading does."""

    name = "vLLM swap_blocks_batch"

    def __init__(self) -> None:
        from vllm import _custom_ops

        self._ops = _custom_ops
        # Batch copies are not allowed on the default stream.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def prepare(self, memory: CellMemory) -> None:
        if not memory.group.layout.groups[0].is_dense:
            raise Unsupported("pages with gaps")

    def move(self, memory: CellMemory, direction: Direction, part: int) -> None:
        plan = plan_of(memory, direction, part)
        src, dst, sizes = map(
            torch.from_numpy, _per_block(memory, plan.pieces, direction)
        )
        with torch.cuda.stream(self._stream):
            self._ops.swap_blocks_batch(
                src, dst, sizes, is_src_access_order_any=direction is Direction.LOAD
            )
        torch.cuda.synchronize()


def _per_block(memory: CellMemory, pieces: Any, direction: Direction) -> Any:
    """Descriptors without the merging of adjacent blocks, which is ours."""
    import numpy as np

    size = memory.group.layout.groups[0].piece_bytes
    counts = pieces.size // size
    step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = (step * size).astype(np.uint64)
    src = np.repeat(pieces.src, counts) + offset
    dst = np.repeat(pieces.dst, counts) + offset
    sizes = np.full(len(src), size, dtype=np.int64)
    return src.view(np.int64), dst.view(np.int64), sizes


class LMCacheDirectArm(Arm):
    """LMCache's multiprocess server with direct copies: NHD only, its fastest."""

    name = "LMCache direct copies"

    def __init__(self) -> None:
        from lmcache import lmcache_native
        from lmcache.v1.gpu_connector import utils
        from lmcache.v1.memory_management import LazyMemoryAllocator
        from lmcache.v1.multiprocess import object_group_transfer as transfer

        if not transfer._HAS_BATCH_MEMCPY_ASYNC:  # noqa: SLF001
            raise ImportError("this build of LMCache has no direct copies")
        self._ops, self._native = transfer.device_ops, lmcache_native
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._utils, self._pin_bytes = utils, LazyMemoryAllocator.PIN_CHUNK_SIZE

    def prepare(self, memory: CellMemory) -> None:
        from lmcache.utils import EngineType

        if memory.shape.layout != "LBNHC":
            raise Unsupported("LMCache copies directly in the NHD layout only")
        utils, caches = self._utils, list(memory.kv_caches.values())
        fmt, tensors = utils.normalize_kv_and_discover_format(
            caches, EngineType.VLLM, layout_hints={"kv_layout": "NHD"}
        )
        layers = memory.shape.layers
        self._format = fmt
        self._tokens = BLOCKS_PER_CHUNK * utils.get_block_size(tensors, fmt)
        self._pointers = utils.get_group_data_ptrs(tensors, fmt, list(range(layers)))
        self._shape = utils.make_page_buffer_shape_desc(
            tensors,
            fmt,
            layer_idx=0,
            num_layers_in_group=layers,
            num_blocks=utils.get_num_blocks(tensors, fmt),
            block_size=utils.get_block_size(tensors, fmt),
        )

    def move(self, memory: CellMemory, direction: Direction, part: int) -> None:
        way = self._native.TransferDirection
        spec = self._ops.DirectCopyGroupSpec(
            self._pointers,
            self._shape,
            self._format,
            self._tokens,
            0,
            memory.parts[part].tolist(),
        )
        objects = [
            self._ops.DirectCopyObject(
                chunk.data_ptr(), 0, chunk.numel() * chunk.element_size(), index, [0]
            )
            for index, chunk in enumerate(memory.chunks(part))
        ]
        with torch.cuda.stream(self._stream):
            self._ops.execute_direct_copy_transfer(
                way.D2H if direction is Direction.STORE else way.H2D,
                memory.device,
                self._pin_bytes,
                [spec],
                objects,
            )
        torch.cuda.synchronize()


def engine_arms(device: torch.device, arms: list[Arm], absent: Absent) -> None:
    """Our engines as they choose, and each of their methods."""
    arms.append(EngineArm("cupy", make_lanes(torch.device("cuda", device.index or 0))))
    runtime = CupyRuntime(device.index or 0)
    for method in CANDIDATES:
        if method.runs_on(runtime):
            pinned = PinnedRanges(runtime)
            one, other = (CupyEngine(runtime, pinned, None, method) for _ in Direction)
            lanes = Lanes(one, other, pinned)
            arms.append(EngineArm(f"cupy {method.value}", lanes))
        else:
            absent[f"cupy {method.value}"] = "the device lacks it"
