"""`python -m bench transfer`: GB/s of our engines, by one copy of as many bytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from bench.command import one_of, write_json
from bench.tables import Check, checks_table, table
from ttlcache.cli.command import option

if TYPE_CHECKING:
    from bench.micro.transfer_run import Row, TransferResult


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """The cells, and how often they are timed."""

    layouts: tuple[str, ...] = option(
        ("LBNHC", "LBHNC", "BLNHC", "LHBNC"), "vLLM's layout names."
    )
    pages_kib: tuple[int, ...] = option(
        (4, 16, 64, 128), "KiB of a block in one layer."
    )
    runs: tuple[int, ...] = option((1, 8), "Adjacent block ids in a row.")
    layers: int = option(32, "Layers of the model.", min=1)
    mib: int = option(64, "MiB of one transfer.", min=1)
    rounds: int = option(9, "Timed rounds.", min=1)
    device: str = option(
        "auto",
        "cpu, cuda, auto (cuda where there is one); link: a simulated one; stand-in: a "
        "CuPy that runs on the CPU, with host memory for the device's.",
    )
    out: Path = option(Path("out/transfer"), "Folder for the result.")

    def __post_init__(self) -> None:
        kinds = ("cpu", "cuda", "auto", "link", "stand-in")
        one_of("--device", self.device, kinds)


def transfer(options: TransferOptions, console: Console) -> int:
    """GB/s both ways by layout, page and run. Status 1: wrong bytes or a missed bar."""
    if options.device == "link":
        from bench.micro.transfer_link import measure

        checks, figures = measure(options.rounds)
        console.print(checks_table("a simulated link of 55 GB/s each way", checks))
        write_json(options.out / "link.json", figures)
        return int(any(check.ok is False for check in checks))
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("needs vLLM: its allocator makes the KV tensors")
    import torch

    from bench.micro.transfer_memory import all_shapes
    from bench.micro.transfer_run import bars, run, to_json

    device, has_cuda = options.device, torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if has_cuda else "cpu"
    if device == "cuda" and not has_cuda:
        console.print("not run: no CUDA device")
        return 1
    pages = tuple(size * 1024 for size in options.pages_kib)
    shapes = all_shapes(
        options.layouts, pages, options.runs, options.layers, options.mib << 20
    )
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    with console.status("transfer") as status:
        result = run(
            shapes,
            options.rounds,
            where,
            status.update,
            on_stand_in=device == "stand-in",
        )
    judged = bars(result)
    _print(result, judged, console)
    path = options.out / "transfer.json"
    write_json(path, to_json(result))
    console.print(f"[dim]{path}[/]")
    missed = result.wrong or not all(bar.ok for bar in judged)
    return 1 if missed else 0


def _print(result: TransferResult, judged: Sequence[Check], console: Console) -> None:
    console.print(_table(result))
    for wrong in result.wrong:
        where = f"{wrong.arm}, {wrong.shape.layout}"
        console.print(f"[red]WRONG[/]: {where}: {wrong.reason}", soft_wrap=True)
    for name, reason in result.not_run.items():
        console.print(f"not run: {name}: {reason}")
    if judged:
        console.print(checks_table("share of the peak", judged))


def _table(result: TransferResult) -> Table:
    """GB/s and share of the peak; a line a cell, a column an arm."""
    arms = list(dict.fromkeys(row.arm for row in result.rows))
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in result.rows:
        shape = row.shape
        key = (shape.layout, shape.page_bytes >> 10, shape.run_blocks, row.direction)
        cells.setdefault(key, {})[row.arm] = row

    def text(row: Row | None) -> str:
        return "-" if row is None else f"{row.gb_per_s:.2f} ({row.of_peak:.2f})"

    return table(
        f"GB/s (x of one copy) on {result.device}",
        ("layout", "page KiB", "run", "way", *arms),
        (
            (*map(str, key), *(text(found.get(arm)) for arm in arms))
            for key, found in cells.items()
        ),
        left=4,
    )
