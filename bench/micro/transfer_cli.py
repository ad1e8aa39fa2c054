"""`python -m bench transfer`: GB/s of our engines, vLLM's and LMCache's movers."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from bench.micro.transfer_run import Bar, Row, TransferResult

LAYOUTS = "LBNHC,LBHNC,BLNHC,LHBNC"
PAGES_KIB = "4,16,64,128"
RUNS = "1,8"


def transfer(
    layouts: Annotated[str, typer.Option(help="vLLM's layout names.")] = LAYOUTS,
    pages_kib: Annotated[
        str, typer.Option(help="KiB of a block in one layer.")
    ] = PAGES_KIB,
    runs: Annotated[str, typer.Option(help="Adjacent block ids in a row.")] = RUNS,
    layers: Annotated[int, typer.Option(help="Layers of the model.", min=1)] = 32,
    mib: Annotated[int, typer.Option(help="MiB of one transfer.", min=1)] = 64,
    rounds: Annotated[int, typer.Option(help="Timed rounds.", min=1)] = 9,
    device: Annotated[
        str, typer.Option(help="cpu, cuda or auto (cuda where there is one).")
    ] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for JSON and CSV.")] = Path(
        "out/transfer"
    ),
) -> None:
    """GB/s both ways by layout, page and run. Status 1: wrong bytes or a missed bar."""
    console = Console()
    if importlib.util.find_spec("vllm") is None:
        raise typer.BadParameter("needs vLLM: its allocator makes the KV tensors")
    import torch

    from bench.micro.transfer_memory import all_shapes
    from bench.micro.transfer_run import bars, run, to_json

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device {device}: expected cpu, cuda or auto")
    if device == "cuda" and not torch.cuda.is_available():
        console.print("not run: no CUDA device")
        raise typer.Exit(1)
    try:
        pages = tuple(size * 1024 for size in _numbers(pages_kib))
        shapes = all_shapes(
            tuple(layouts.split(",")), pages, _numbers(runs), layers, mib << 20
        )
        where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        with console.status("transfer") as status:
            result = run(shapes, rounds, where, status.update)
    except (KeyError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    _print(result, bars(result), console)
    out.mkdir(parents=True, exist_ok=True)
    (out / "transfer.json").write_text(json.dumps(to_json(result), indent=1) + "\n")
    write_csv(result.rows, out / "transfer.csv")
    console.print(f"[dim]{out / 'transfer.json'}, {out / 'transfer.csv'}[/]")
    missed = result.num_wrong or not all(bar.passed for bar in bars(result))
    raise typer.Exit(1 if missed else 0)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _print(result: TransferResult, judged: Sequence[Bar], console: Console) -> None:
    console.print(_table(result))
    refused = {(s.arm, s.shape.layout, s.reason): s for s in result.skipped}
    for skipped in refused.values():
        word = "[red]WRONG[/]" if skipped.is_wrong else "not run"
        where = f"{skipped.arm}, {skipped.shape.layout}"
        console.print(f"{word}: {where}: {skipped.reason}", soft_wrap=True)
    for absent in result.not_run:
        console.print(f"not run: {absent.name}: {absent.reason}")
    for bar in judged:
        verdict = "[green]pass[/]" if bar.passed else "[red]FAIL[/]"
        shape = bar.row.shape
        where = f"{shape.layout} x {shape.run_blocks}, {bar.row.direction}"
        text = f"{bar.name}: {bar.value:.2f} >= {bar.limit} ({where})"
        console.print(f"{verdict} {text}", soft_wrap=True)


def _table(result: TransferResult) -> Table:
    """GB/s and share of the peak; a line a cell, a column an arm."""
    arms = list(dict.fromkeys(row.arm for row in result.rows))
    view = Table(title=f"GB/s (x of one copy) on {result.device}", title_justify="left")
    for heading in ("layout", "page KiB", "run", "way"):
        view.add_column(heading)
    for arm in arms:
        view.add_column(arm, justify="right")
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in result.rows:
        shape = row.shape
        key = (shape.layout, shape.page_bytes >> 10, shape.run_blocks, row.direction)
        cells.setdefault(key, {})[row.arm] = row
    for key, found in cells.items():
        texts = [
            f"{found[arm].gb_per_s:.2f} ({found[arm].of_peak:.2f})"
            if arm in found
            else "-"
            for arm in arms
        ]
        view.add_row(*(str(part) for part in key), *texts)
    return view


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line a row of the result."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = ["layout", "page_bytes", "run_blocks", "layers", "num_bytes"]
        values = ["direction", "arm", "gb_per_s", "of_peak", "of_peak_cpu", "rounds"]
        writer.writerow(names + values)
        for row in rows:
            writer.writerow(
                [getattr(row.shape, name) for name in names]
                + [getattr(row, name) for name in values]
            )
