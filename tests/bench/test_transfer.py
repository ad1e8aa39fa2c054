"""The transfer bench on the CPU: it verifies, it pairs, it says what was not run."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from bench.cli import app
from bench.micro.transfer_arms import EngineArm, OneCopy, make_arms
from bench.micro.transfer_link import layout_of, transfer
from bench.micro.transfer_memory import PARTS, CellMemory, CellShape, all_shapes
from bench.micro.transfer_run import BOTH, run, verify
from tests.commands import output_of
from ttlcache.transfer import Direction
from ttlcache_connector.copy.engines import make_engines

CPU = torch.device("cpu")
SHAPE = CellShape("LBNHC", 4096, 3, 4, 1 << 20)


class Broken(EngineArm):
    """Loses, moves or adds bytes."""

    def __init__(self, how):
        super().__init__("broken", make_engines(CPU))
        self.how = how

    def move(self, memory, direction, part):
        seconds = super().move(memory, direction, part)
        if self.how == "does nothing on load" and direction is Direction.LOAD:
            memory.wipe_blocks(part)
        elif self.how == "loses the last byte" and direction is Direction.STORE:
            chunk = memory.chunks(part)[-1].view(torch.uint8).flatten()
            chunk[-1] ^= 1
        elif self.how == "strays" and direction is Direction.LOAD:
            free = set(range(memory.num_blocks)) - set(memory.parts[part].tolist())
            memory.kv_caches["layers.0"][min(free)] = 0
        elif self.how == "writes on store" and direction is Direction.STORE:
            memory.pool[0] ^= 1
        return seconds


@pytest.mark.parametrize(
    "how", ["does nothing on load", "loses the last byte", "strays", "writes on store"]
)
def test_wrong_bytes_are_found(how):
    memory = CellMemory(SHAPE, CPU)
    arm = Broken(how)
    assert verify(arm, memory) != ""
    arm.how = "not at all"
    assert verify(arm, memory) == ""
    result = run([SHAPE], 1, CPU, arms=[OneCopy(), Broken(how)])
    assert [wrong.arm for wrong in result.wrong] == ["broken"]
    assert {row.arm for row in result.rows} == {"one copy"}


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC", "LHBNC"])
def test_runs_are_as_long_as_asked_and_parts_disjoint(layout):
    memory = CellMemory(replace(SHAPE, layout=layout), CPU)
    seen = [block for part in memory.parts for block in part.tolist()]
    assert len(seen) == len(set(seen)) == PARTS * memory.shape.blocks
    assert max(seen) < memory.num_blocks
    steps = [b - a for a, b in itertools.pairwise(seen)]
    joined = sum(step == 1 for step in steps) / len(steps)
    assert joined == pytest.approx(2 / 3, abs=0.02)


def test_every_arm_of_this_machine_is_right():
    arms, absent = make_arms(CPU)
    shapes = all_shapes(("LBNHC", "LBHNC", "BLNHC"), (4096,), (1,), 4, 1 << 19)
    result = run(shapes, 2, CPU, arms=arms)
    assert result.wrong == []
    assert {row.arm for row in result.rows} == {"one copy", "reference"}
    both = [row.arm for row in result.rows if row.direction == BOTH]
    assert set(both) == {"reference"}
    assert {row.direction for row in result.rows} == {"store", "load", BOTH}
    assert all(row.gb_per_s > 0 and row.of_peak > 0 for row in result.rows)
    ours = [row for row in result.rows if row.arm == "reference"]
    assert all(0 < row.on_device <= 1 for row in ours)
    assert "CUDA" in absent["cupy"]


def test_the_command_writes_its_rows(tmp_path):
    words = "transfer --layouts LBNHC --pages-kib 4 --runs 2 --layers 2 --mib 1 "
    words += f"--rounds 1 --device cpu --out {tmp_path}"
    printed = output_of(app, *words.split())
    assert "not run: cupy: no CUDA device" in printed
    found = json.loads((tmp_path / "transfer.json").read_text())
    arms = {row["arm"] for row in found["rows"]}
    assert {"one copy", "reference"} <= arms


@pytest.mark.speed
def test_the_copy_loop_keeps_a_link_busy(tmp_path):
    output_of(app, *f"transfer --device link --rounds 5 --out {tmp_path}".split())


def test_the_link_takes_the_time_of_its_bytes():
    found = transfer(layout_of("BLNHC"), Direction.STORE, Direction.LOAD)
    assert 0.2 < found.busy < 2.0
    assert found.load_begins_s > 0
