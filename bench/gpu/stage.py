"""A stage of `bench gpu`: cells measured one by one, written as each is done."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.command import versions, write_json
from bench.tables import Check

if TYPE_CHECKING:
    from bench.gpu.sizes import Sizes

ROOT = Path(__file__).parents[2]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """checks: hold on every machine. bars: of speed and equipment, for a GPU only."""

    checks: list[Check] = field(default_factory=list)
    bars: list[Check] = field(default_factory=list)


class Stage:
    """What one stage found so far, in a JSON file.

    Args:
        header: what a resumed stage must have in common with what the file holds.
    """

    def __init__(
        self, name: str, sizes: Sizes, folder: Path, header: Mapping[str, Any]
    ) -> None:
        self.name, self.sizes, self.folder = name, sizes, folder
        self.machine: Mapping[str, str] = header["machine"]
        found = read(folder, name)
        if {key: found.get(key) for key in header} != header:
            found = {}
        # The file's `seconds` are those of all runs.
        self._began_s = time.monotonic() - found.get("seconds", 0.0)
        self._found = {"stage": name, **header, "cells": found.get("cells", {})}

    @property
    def cells(self) -> Json:
        """Results by name."""
        cells: Json = self._found["cells"]
        return cells

    def cell(self, name: str, measure: Callable[[], Any]) -> Any:
        """The cell's result; measured unless an earlier run did."""
        if name not in self.cells:
            self.cells[name] = json.loads(json.dumps(measure(), default=str))
            self.write("running")
        return self.cells[name]

    def write(self, status: str, verdict: Verdict | None = None) -> None:
        judged = asdict(verdict) if verdict is not None else {}
        path = self.folder / f"{self.name}.json"
        state = {"status": status, "seconds": time.monotonic() - self._began_s}
        write_json(path, {**self._found, **state, **judged})


def read(folder: Path, name: str) -> Json:
    """A stage's file; empty where there is none."""
    path = folder / f"{name}.json"
    found: Json = json.loads(path.read_text()) if path.exists() else {}
    return found


def device_name() -> str | None:
    """The first CUDA device, without making a context on it; None: there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, name = ctypes.c_int(0), ctypes.create_string_buffer(128)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return None
    if not count.value or driver.cuDeviceGetName(name, len(name), 0):
        return None
    return name.value.decode()


def machine(sizes: Sizes) -> dict[str, str]:
    """The GPU, its driver, and the versions of what is measured."""
    gpu = device_name() if sizes.on_device else "stand-in"
    return {"gpu": gpu or "none", "driver": _driver_version(), **versions()}


def _driver_version() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.strip().partition("\n")[0] or "unknown"
