"""The movers that the transfer bench compares."""

from __future__ import annotations

import ctypes
import os

import torch

from bench.micro.transfer_arm import Absent, Arm, EngineArm, Unsupported, try_arm
from bench.micro.transfer_cuda import LMCacheDirectArm, SwapBlocksArm, engine_arms
from bench.micro.transfer_memory import BLOCKS_PER_CHUNK, CellMemory
from ttlcache.transfer import Direction
from ttlcache_connector.copy.lanes import make_lanes


class OneCopy(Arm):
    """The peak: the same number of bytes in one piece."""

    name = "one copy"
    moves_blocks = False

    def move(self, memory: CellMemory, direction: Direction, part: int) -> None:
        paged, host = memory.straight(part)
        store = direction is Direction.STORE
        target, source = (host, paged) if store else (paged, host)
        if memory.device.type == "cuda":
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
        else:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())


class LMCacheArm(Arm):
    """The mover of LMCache's worker-driven transfer, chunk for chunk.

    On the CPU with one torch thread: its many small copies gain nothing from a second
    one, and on a busy machine lose a hundredfold waiting for it.
    """

    name = "LMCache mover"

    def __init__(self) -> None:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")  # it logs every call
        from lmcache.v1.multiprocess.transfer_context import base

        self._base = base
        self._hints: dict[str, str] = {}

    def prepare(self, memory: CellMemory) -> None:
        layout = memory.shape.layout
        if layout not in ("LBNHC", "LBHNC"):
            raise Unsupported(f"LMCache has no format for {layout}")
        self._hints = {"kv_layout": "NHD" if layout == "LBNHC" else "HND"}

    def move(self, memory: CellMemory, direction: Direction, part: int) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._move(memory, direction, part)
        finally:
            torch.set_num_threads(threads)
        if memory.device.type == "cuda":
            torch.cuda.synchronize()

    def _move(self, memory: CellMemory, direction: Direction, part: int) -> None:
        ids, chunks = memory.parts[part].tolist(), memory.chunks(part)
        hints = {"layout_hints": self._hints}
        caches = memory.kv_caches
        if direction is Direction.STORE:
            self._base.gather_paged_kv_to_cpu(
                caches, ids, BLOCKS_PER_CHUNK, out=chunks, **hints
            )
        else:
            self._base.scatter_cpu_to_paged_kv(
                caches, ids, chunks, BLOCKS_PER_CHUNK, **hints
            )


def make_arms(
    device: torch.device, *, on_stand_in: bool = False
) -> tuple[list[Arm], Absent]:
    """Every arm for this device; the peak first.

    on_stand_in: host memory plays the device's, for a CuPy that runs on the CPU.
    """
    arms: list[Arm] = [OneCopy()]
    absent: Absent = {}
    if device.type == "cuda" or on_stand_in:
        engine_arms(device, arms, absent)
    else:
        arms.append(EngineArm("reference", make_lanes(device)))
        absent["cupy"] = "no CUDA device"
    for direct in (SwapBlocksArm, LMCacheDirectArm):
        if device.type == "cuda":
            try_arm(direct.name, direct, arms, absent)
        else:
            absent[direct.name] = "no CUDA device"
    try_arm(LMCacheArm.name, LMCacheArm, arms, absent)
    return arms, absent
