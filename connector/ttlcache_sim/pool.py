"""Cells in parallel processes, with a progress bar."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from ttlcache_sim.settings import Cell, CellResult

_Cell = TypeVar("_Cell", bound=Cell)
_NONE: Mapping[int, CellResult] = MappingProxyType({})


def simulate(cell: Cell) -> CellResult:
    """One cell, in this process."""
    # Here, not above: only what runs cells pays for importing vLLM.
    with quiet_imports():
        from ttlcache_sim.cell import run_cell

    return run_cell(cell)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Without what vLLM and torch print while they are imported."""
    with open(os.devnull, "w") as sink, contextlib.redirect_stderr(sink):
        yield


@contextlib.contextmanager
def workers(number: int) -> Iterator[Executor | None]:
    """Processes that `run_cells` runs cells on; None for fewer than two of them."""
    if number < 2:
        yield None
        return
    # Fresh interpreters: torch and vLLM do not survive a fork well.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(number, context, initializer=_start_worker) as pool:
        yield pool


def run_cells(
    cells: Sequence[_Cell],
    on: Executor | None,
    *,
    console: Console | None = None,
    known: Mapping[int, CellResult] = _NONE,
    keep: Callable[[_Cell, CellResult], None] = lambda cell, result: None,
) -> list[CellResult]:
    """Results in the order of `cells`; a failing cell raises after the others.

    Args:
        on: of `workers`; None: one cell after the other, in this process.
        known: results that need no run, by index.
        keep: called in this process with each new result, as soon as it is there.

    Raises:
        RuntimeError: naming every cell that failed.
    """
    results = dict(known)
    failures: list[str] = []
    todo = [(index, cell) for index, cell in enumerate(cells) if index not in known]
    with _progress(console) as progress:
        task = progress.add_task("cells", total=len(cells), completed=len(results))
        for index, result in _run_all(todo, on):
            cell = cells[index]
            try:
                results[index] = result()
            except Exception as error:  # noqa: BLE001 - the other cells go on
                failures.append(f"{label(cell)}: {error!r}")
            else:
                keep(cell, results[index])
            progress.update(task, advance=1, description=label(cell))
    if failures:
        raise RuntimeError(f"{len(failures)} cells failed: " + "; ".join(failures))
    return [results[index] for index in range(len(cells))]


def label(cell: Cell) -> str:
    """For people; of a trace the name of its file."""
    name = Path(cell.workload.name).name
    return f"{name} {cell.name} seed {cell.workload.seed}"


def _run_all(
    todo: Sequence[tuple[int, Cell]], on: Executor | None
) -> Iterator[tuple[int, Callable[[], CellResult]]]:
    """What gives the result of each cell, or raises, as soon as it is done."""
    if on is None:
        # Not by the environment, which servers that are started later would inherit,
        # nor by a logger's level: vLLM sets that of its own while a cell is built.
        logging.disable(logging.WARNING)
        try:
            yield from ((index, partial(simulate, cell)) for index, cell in todo)
        finally:
            logging.disable(logging.NOTSET)
        return
    futures = {on.submit(simulate, cell): index for index, cell in todo}
    for future in as_completed(futures):
        yield futures[future], future.result


def _start_worker() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def _progress(console: Console | None) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console or Console(stderr=True),
        transient=True,
    )
