"""What the transfer bench times: our engines, each of their methods, and the peak."""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod

import torch

from bench.micro.transfer_memory import BLOCKS_PER_CHUNK, CellMemory
from ttlcache.errors import TransferError
from ttlcache.transfer import Direction, plan_copies
from ttlcache.transfer.calibrate import CANDIDATES
from ttlcache.transfer.cupy_engine import CupyEngine
from ttlcache.transfer.cupy_runtime import CupyRuntime
from ttlcache.transfer.host_memory import HostRanges
from ttlcache.transfer.plan import CopyPlan
from ttlcache_connector.copy.engines import CopyEngines, make_engines

WAIT_S = 300.0

#: Arms that a machine cannot run, and why.
Absent = dict[str, str]


class Arm(ABC):
    """Moves a part's blocks; returns when the bytes are there."""

    name: str
    moves_blocks = True
    """False: as many bytes, but not the blocks (the peak)."""

    def prepare(self, memory: CellMemory) -> None:  # noqa: B027 - most need nothing
        """Once a cell, untimed."""

    @abstractmethod
    def move(self, memory: CellMemory, direction: Direction, part: int) -> float:
        """Timed, planning included; seconds by the device's clock, NaN if not known."""

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

    def move(self, memory: CellMemory, direction: Direction, part: int) -> float:
        paged, host = memory.straight(part)
        store = direction is Direction.STORE
        target, source = (host, paged) if store else (paged, host)
        if memory.device.type == "cuda":
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
        else:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())
        return math.nan


class EngineArm(Arm):
    """Our engines, as the lower tiers have them."""

    def __init__(self, name: str, engines: CopyEngines) -> None:
        self.name, self._engines = name, engines
        self._host = 0

    def prepare(self, memory: CellMemory) -> None:
        self._engines.forget_host(self._host)  # the last cell's is freed by now
        self._host = memory.host.data_ptr()
        self._engines.add_host(self._host, memory.host.numel(), is_pinned=True)

    def move(self, memory: CellMemory, direction: Direction, part: int) -> float:
        self._submit(memory, direction, part)
        return self._end(direction)

    def move_both(self, memory: CellMemory, store_part: int, load_part: int) -> float:
        """A store and a load at once; as `move`, of the longer one."""
        self._submit(memory, Direction.STORE, store_part)
        self._submit(memory, Direction.LOAD, load_part)
        return max(self._end(direction) for direction in Direction)

    def _submit(self, memory: CellMemory, direction: Direction, part: int) -> None:
        plan = plan_of(memory, direction, part)
        self._engines.engine(direction).submit(plan)

    def _end(self, direction: Direction) -> float:
        engine = self._engines.engine(direction)
        if not engine.flush(WAIT_S):
            raise TransferError(f"{self.name}: not done within {WAIT_S} s")
        (outcome,) = engine.poll()
        if not outcome.ok:
            raise TransferError(f"{self.name}: {outcome.detail}")
        return outcome.seconds

    def close(self) -> None:
        self._engines.close()


def make_arms(
    device: torch.device, *, on_stand_in: bool = False
) -> tuple[list[Arm], Absent]:
    """Every arm for this device; the peak first.

    on_stand_in: host memory plays the device's, for a CuPy that runs on the CPU.
    """
    arms: list[Arm] = [OneCopy()]
    absent: Absent = {}
    if device.type == "cuda" or on_stand_in:
        _engine_arms(device, arms, absent)
    else:
        arms.append(EngineArm("reference", make_engines(device)))
        absent["cupy"] = "no CUDA device"
    return arms, absent


def _engine_arms(device: torch.device, arms: list[Arm], absent: Absent) -> None:
    """Our engines as they choose, and each of their methods."""
    arms.append(
        EngineArm("cupy", make_engines(torch.device("cuda", device.index or 0)))
    )
    runtime = CupyRuntime(device.index or 0)
    for method in CANDIDATES:
        if method.runs_on(runtime):
            pinned = HostRanges(runtime)
            one, other = (CupyEngine(runtime, pinned, None, method) for _ in Direction)
            engines = CopyEngines(one, other, pinned)
            arms.append(EngineArm(f"cupy {method.value}", engines))
        else:
            absent[f"cupy {method.value}"] = "the device lacks it"
