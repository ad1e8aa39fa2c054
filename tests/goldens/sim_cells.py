"""The cells of `sim.json`: every arm, short of memory, with a tier and without.

python tests/goldens/sim_cells.py           # lists the cells that changed
python tests/goldens/sim_cells.py --write   # after a change that is meant to
                                            # move numbers: say which in the commit
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.sim.rivals.arms import ARMS
from bench.sim.settings import Cell, EngineSetting
from ttlcache_sim.cell import run_cell
from ttlcache_sim.load.workload import WorkloadSpec
from ttlcache_sim.settings import CellResult

PATH = Path(__file__).parent / "sim.json"

WORKLOADS = ("swe", "bfcl")
POOLS = (1_000, 2_000)
OFFLOADS = ("none", "cpu:4")


def cells() -> Iterator[tuple[str, Cell]]:
    """Name and cell, in the order of the file."""
    for workload in WORKLOADS:
        for blocks in POOLS:
            for offload in OFFLOADS:
                engine = EngineSetting(
                    blocks=blocks, max_num_batched_tokens=1024, offload=offload
                )
                load = WorkloadSpec(
                    workload,
                    programs=12,
                    rate=1.0,
                    seed=1,
                    max_context=engine.max_context // 2,
                )
                for name, arm in ARMS.items():
                    yield (
                        f"{workload} {blocks} {offload} {name}",
                        Cell(arm, engine, load),
                    )


def summary(result: CellResult) -> dict[str, Any]:
    """Three numbers for people, and the hash of all that the cell wrote."""
    metrics = result.metrics
    text = json.dumps(metrics, sort_keys=True)
    return {
        "mean_jct_s": metrics["mean_jct_s"],
        "p90_jct_s": metrics["p90_jct_s"],
        "prompt_hit": metrics["prompt_hit"],
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def main() -> None:
    """Ends with 1 if any byte of any cell changed and `--write` is not given."""
    before = json.loads(PATH.read_text()) if PATH.exists() else {}
    after = {name: summary(run_cell(cell)) for name, cell in cells()}
    changed = [name for name in after if before.get(name) != after[name]]
    for name in changed:
        old, new = before.get(name), after[name]
        print(f"{name}: mean JCT {old and old['mean_jct_s']} -> {new['mean_jct_s']} s")
    print(f"{len(changed)} of {len(after)} cells changed")
    if "--write" in sys.argv[1:]:
        PATH.write_text(json.dumps(after, indent=1) + "\n")
    elif changed:
        sys.exit(1)


if __name__ == "__main__":
    main()
