"""A mover of KV blocks as the transfer bench times it, and the one of our engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from bench.micro.transfer_memory import BLOCKS_PER_CHUNK, CellMemory
from ttlcache.errors import TransferError
from ttlcache.transfer import Direction, plan_copies
from ttlcache.transfer.plan import CopyPlan
from ttlcache_connector.copy.lanes import Lanes

WAIT_S = 300.0

#: Arms that a machine cannot run, and why.
Absent = dict[str, str]


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


class EngineArm(Arm):
    """Our engines, as the lower tiers have them."""

    def __init__(self, name: str, lanes: Lanes) -> None:
        self.name, self._lanes = name, lanes
        self._host = 0

    def prepare(self, memory: CellMemory) -> None:
        self._lanes.forget_host(self._host)  # the last cell's is freed by now
        self._host = memory.host.data_ptr()
        self._lanes.add_host(self._host, memory.host.numel(), is_pinned=True)

    def move(self, memory: CellMemory, direction: Direction, part: int) -> None:
        self._submit(memory, direction, part)
        self._end(direction)

    def move_both(self, memory: CellMemory, store_part: int, load_part: int) -> None:
        """A store and a load at once. Timed, planning included."""
        self._submit(memory, Direction.STORE, store_part)
        self._submit(memory, Direction.LOAD, load_part)
        for direction in Direction:
            self._end(direction)

    def _submit(self, memory: CellMemory, direction: Direction, part: int) -> None:
        plan = plan_of(memory, direction, part)
        self._lanes.engine(direction).submit(plan)

    def _end(self, direction: Direction) -> None:
        engine = self._lanes.engine(direction)
        if not engine.flush(WAIT_S):
            raise TransferError(f"{self.name}: not done within {WAIT_S} s")
        for outcome in engine.poll():
            if not outcome.ok:
                raise TransferError(f"{self.name}: {outcome.detail}")

    def close(self) -> None:
        self._lanes.close()


def try_arm(
    name: str, make: Callable[[], Arm], arms: list[Arm], absent: Absent
) -> None:
    """Add an arm, or why this machine cannot run it."""
    try:
        arms.append(make())
    except (ImportError, AttributeError, OSError, TransferError) as error:
        absent[name] = str(error)
