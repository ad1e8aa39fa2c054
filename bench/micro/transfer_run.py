"""Runs the transfer bench: every byte verified, then timed in paired rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from bench.micro.overhead_driver import machine
from bench.micro.transfer_arms import Arm, EngineArm, make_arms
from bench.micro.transfer_memory import PARTS, CellMemory, CellShape
from bench.tables import Check
from ttlcache.errors import TransferError
from ttlcache.transfer import Direction
from ttlcache.transfer.cupy_runtime import CupyRuntime

#: An arm that has used so much time in a cell sits out the later rounds.
ARM_BUDGET_S = 4.0
#: A row's direction, for a store and a load at once.
BOTH = "both"
#: What it is judged by.
_ONE_WAY = tuple(direction.value for direction in Direction)


@dataclass(frozen=True, slots=True)
class Bar:
    """The least share of the peak in rows of such pieces."""

    name: str
    arm: str
    piece_bytes: int
    """At least."""
    limit: float
    ways: tuple[str, ...] = _ONE_WAY


BARS = (
    Bar("cupy by one pinned copy, pieces of 64 KiB or more", "cupy", 64 << 10, 0.92),
    Bar(
        "cupy both ways at once, by one after the other",
        *("cupy", 64 << 10, 1.6, (BOTH,)),
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One arm in one cell in one direction; medians over the rounds.

    `of_peak` is the median over rounds of the peak's time by this arm's in the same
    round: other load on the machine meets both. In rows of `BOTH` the peak is the
    arm's own store and load, one after the other. `on_device` is the share of the time
    between the first copy's begin and the last one's end, by the device's clock: the
    rest is planning, threads and calls. None for the peak.
    """

    shape: CellShape
    direction: str
    arm: str
    gb_per_s: float
    of_peak: float
    on_device: float | None
    rounds: int


@dataclass(frozen=True, slots=True)
class Wrong:
    """An arm that failed in a cell, or moved wrong bytes."""

    shape: CellShape
    arm: str
    reason: str


@dataclass(slots=True)
class TransferResult:
    """Everything the bench found."""

    device: str
    rows: list[Row] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    """Arms that this machine cannot run, and why."""


def run(
    shapes: list[CellShape],
    rounds: int,
    device: torch.device,
    progress: Callable[[str], None] = lambda text: None,
    arms: list[Arm] | None = None,
    *,
    on_stand_in: bool = False,
) -> TransferResult:
    """Measure every arm in every cell.

    Args:
        arms: default: all that this device runs; the first one is the peak.
        on_stand_in: see `make_arms`.
    """
    result = TransferResult("stand-in" if on_stand_in else str(device))
    if arms is None:
        arms, result.not_run = make_arms(device, on_stand_in=on_stand_in)
    try:
        for shape in shapes:
            progress(f"{shape.layout} {shape.page_bytes} B x {shape.run_blocks}")
            memory = CellMemory(shape, device)
            with _known_to_stand_in(memory) if on_stand_in else nullcontext():
                able = [arm for arm in arms if _is_right(arm, memory, result)]
                result.rows += _measure(able, memory, rounds)
            del memory
    finally:
        for arm in arms:
            arm.close()
    return result


@contextmanager
def _known_to_stand_in(memory: CellMemory) -> Iterator[None]:
    """Both sides are host memory; the stand-in lets no kernel touch any other."""
    runtime = CupyRuntime(0)
    sides = memory.pool, memory.host
    for side in sides:
        runtime.pin(side.data_ptr(), side.numel())
    yield
    for side in sides:
        runtime.unpin(side.data_ptr())


def _is_right(arm: Arm, memory: CellMemory, result: TransferResult) -> bool:
    """Whether the arm moves every byte of this cell there and back."""
    try:
        arm.prepare(memory)
        reason = verify(arm, memory)
    except TransferError as error:
        reason = str(error)
    if reason:
        result.wrong.append(Wrong(memory.shape, arm.name, reason))
    return not reason


def verify(arm: Arm, memory: CellMemory) -> str:
    """What is wrong after a store, the loss of the blocks, and a load; "" if nothing.

    Compares the whole pool, so that stray writes show as well. Also warms up.
    """
    memory.randomise()
    if not arm.moves_blocks:
        return _verify_straight(arm, memory)
    before, part = memory.pool.clone(), PARTS - 1
    _settle(memory)
    arm.move(memory, Direction.STORE, part)
    if not torch.equal(memory.pool, before):
        return "a store changed the pool"
    memory.wipe_blocks(part)
    _settle(memory)
    arm.move(memory, Direction.LOAD, part)
    if not torch.equal(memory.pool, before):
        wrong = int((memory.pool != before).sum())
        return f"{wrong} bytes differ after the blocks came back"
    return ""


def _settle(memory: CellMemory) -> None:
    """Let torch's stream end its work: engines have streams of their own."""
    if memory.device.type == "cuda":
        torch.cuda.synchronize()


def _verify_straight(arm: Arm, memory: CellMemory) -> str:
    for direction in Direction:
        arm.move(memory, direction, 0)
        paged, host = memory.straight(0)
        if not torch.equal(paged.cpu(), host):
            return f"{direction.value}: bytes differ"
        memory.randomise()
    return ""


def _measure(arms: list[Arm], memory: CellMemory, rounds: int) -> list[Row]:
    """Rounds over all arms, in turning order, both directions, and both at once."""
    wall: dict[tuple[str, str], list[float]] = {}
    device: dict[tuple[str, str], list[float]] = {}

    def timed(arm: Arm, way: str, move: Callable[[], float]) -> None:
        began_s = time.perf_counter()
        device_s = move()
        wall.setdefault((arm.name, way), []).append(time.perf_counter() - began_s)
        device.setdefault((arm.name, way), []).append(device_s)

    for number in range(rounds):
        turn, part = number % len(arms), number % PARTS
        for arm in (*arms[turn:], *arms[:turn]):
            spent_s = sum(sum(wall.get((arm.name, way), ())) for way in _ONE_WAY)
            if number >= 2 and spent_s > ARM_BUDGET_S:
                continue
            for direction in Direction:
                timed(arm, direction.value, partial(arm.move, memory, direction, part))
            if isinstance(arm, EngineArm):
                parts = part, (part + 1) % PARTS
                timed(arm, BOTH, partial(arm.move_both, memory, *parts))
    peak = arms[0].name

    def row(arm: str, way: str) -> Row:
        seconds, moved = wall[arm, way], memory.shape.num_bytes
        if way == BOTH:
            apart = zip(*(wall[arm, one] for one in _ONE_WAY), strict=True)
            share, moved = _ratio(list(map(sum, apart)), seconds), 2 * moved
        else:
            share = _ratio(wall[peak, way], seconds)
        speed = moved / statistics.median(seconds) / 1e9
        on_device = None if arm == peak else _ratio(device[arm, way], seconds)
        return Row(memory.shape, way, arm, speed, share, on_device, len(seconds))

    return [row(arm, way) for arm, way in wall]


def _ratio(peak: list[float], own: list[float]) -> float:
    return statistics.median(p / max(o, 1e-9) for p, o in zip(peak, own, strict=False))


def bars(result: TransferResult) -> list[Check]:
    """What this run can judge: the worst row of each bar, its share of the peak."""
    found = []
    for bar in BARS:
        rows = [
            row
            for row in result.rows
            if row.arm == bar.arm
            and row.direction in bar.ways
            and row.shape.piece_bytes >= bar.piece_bytes
            # Pages of heads outside blocks are cut into smaller pieces.
            and row.shape.layout != "LHBNC"
        ]
        if not rows:
            continue
        worst = min(rows, key=attrgetter("of_peak"))
        value, shape = worst.of_peak, worst.shape
        where = f"{shape.layout} x {shape.run_blocks}, {worst.direction}"
        text = f"{bar.name} ({where})"
        found.append(Check(text, value >= bar.limit, f"{value:.2f}", f">= {bar.limit}"))
    return found


def to_json(result: TransferResult) -> dict[str, Any]:
    """Everything found, and the machine."""
    return {
        **asdict(result),
        "bars": [asdict(bar) for bar in bars(result)],
        "machine": {
            **machine(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "torch": torch.__version__,
        },
    }
