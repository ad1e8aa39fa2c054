"""The movers that the transfer bench compares, behind one small face."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.transfer_memory import BLOCKS_PER_CHUNK, CellMemory
from ttlcache.errors import TransferError
from ttlcache.transfer import Direction, ReferenceEngine, TransferEngine, plan_copies
from ttlcache.transfer.plan import CopyPlan

WAIT_S = 300.0


class Unsupported(Exception):
    """This arm does not serve this cell; the text says why."""


class Arm(ABC):
    """Moves a part's blocks; returns when the bytes are there."""

    name: str
    moves_blocks = True
    """False: as many bytes, but not the blocks (the peak)."""

    def prepare(self, memory: CellMemory) -> None:  # noqa: B027 - most need nothing
        """Once a cell, untimed.

        Raises:
            Unsupported: the arm does not serve it.
        """

    @abstractmethod
    def move(self, memory: CellMemory, direction: Direction, part: int) -> None:
        """Timed, planning included."""

    def close(self) -> None:  # noqa: B027
        """Give back what the arm holds."""


def plan_of(memory: CellMemory, direction: Direction, part: int) -> CopyPlan:
    """The plan that our engines get."""
    return plan_copies(
        direction,
        memory.group.layout,
        memory.parts[part],
        [chunk.data_ptr() for chunk in memory.chunks(part)],
        BLOCKS_PER_CHUNK,
    )


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


class EngineArm(Arm):
    """One of our engines."""

    def __init__(self, name: str, engine: TransferEngine) -> None:
        self.name, self._engine = name, engine

    def prepare(self, memory: CellMemory) -> None:
        pinned = getattr(self._engine, "pinned", None)
        if pinned is not None:
            pinned.adopt(memory.host.data_ptr(), memory.host.numel())

    def move(self, memory: CellMemory, direction: Direction, part: int) -> None:
        self._engine.submit(plan_of(memory, direction, part))
        if memory.device.type == "cuda":
            torch.cuda.synchronize()  # finer than the steps of `flush`
        if not self._engine.flush(WAIT_S):
            raise TransferError(f"{self.name}: not done within {WAIT_S} s")
        for outcome in self._engine.poll():
            if not outcome.ok:
                raise TransferError(f"{self.name}: {outcome.detail}")

    def close(self) -> None:
        self._engine.close()


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


@dataclass(frozen=True, slots=True)
class NotRun:
    """An arm that this machine cannot run, and why."""

    name: str
    reason: str


def make_arms(device: torch.device) -> tuple[list[Arm], list[NotRun]]:
    """Every arm for this device; the peak first."""
    arms: list[Arm] = [OneCopy()]
    absent: list[NotRun] = []
    if device.type == "cuda":
        from bench.transfer_cuda import cuda_arms

        cuda_arms(device, arms, absent)
    else:
        arms.append(EngineArm("reference", ReferenceEngine()))
        absent += [
            NotRun("cupy", "no CUDA device"),
            NotRun("vLLM swap_blocks_batch", "no CUDA device: vLLM has none for CPU"),
            NotRun("LMCache direct copies", "no CUDA device"),
        ]
    if importlib.util.find_spec("lmcache") is None:
        absent.append(NotRun(LMCacheArm.name, "lmcache is not installed"))
    else:
        _try(LMCacheArm.name, LMCacheArm, arms, absent)
    return arms, absent


def _try(
    name: str, make: Callable[[], Any], arms: list[Arm], absent: list[NotRun]
) -> None:
    try:
        arms.append(make())
    except (ImportError, OSError, TransferError) as error:
        absent.append(NotRun(name, str(error)))
