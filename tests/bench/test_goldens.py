"""The simulator's numbers stay what they were, for every arm."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="cells run on vLLM's own scheduler")

from ttlcache_sim.cell import run_cell

_SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "goldens" / "sim_cells.py"))
CELLS = dict(_SCRIPT["cells"]())
GOLDENS = json.loads(_SCRIPT["PATH"].read_text())


def _marks(name: str) -> list[pytest.MarkDecorator]:
    """Ours and the paper's rules in one pool for every commit, the others at night."""
    arm = CELLS[name].arm
    is_quick = name.startswith("swe 1000 none ") and arm.bounded and not arm.gate
    return [] if is_quick else [pytest.mark.nightly]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=_marks(name)) for name in CELLS]
)
def test_numbers_are_those_of_the_file(name):
    """Within rounding: libraries for other processors differ in the last bit."""
    expected = GOLDENS[name]
    found = _SCRIPT["summary"](run_cell(CELLS[name]))
    del expected["sha256"], found["sha256"]
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_file_has_every_cell():
    assert set(GOLDENS) == set(CELLS)
