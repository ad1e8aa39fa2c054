"""vLLM's CUDA layouts on a CUDA device: out to pinned chunks and back."""

import pytest

pytestmark = pytest.mark.gpu
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC")


def test_every_arm_moves_every_byte_of_every_layout(torch_device):
    pytest.importorskip("vllm")
    from bench.micro.transfer_arms import make_arms
    from bench.micro.transfer_memory import CellShape
    from bench.micro.transfer_run import run

    on_stand_in = torch_device.type == "cpu"
    moved_bytes = (1 if on_stand_in else 8) << 20
    arms, _ = make_arms(torch_device, on_stand_in=on_stand_in)
    shapes = [
        CellShape(layout, page << 10, 3, 4, moved_bytes)
        for layout in LAYOUTS
        for page in (4, 64)
    ]
    result = run(shapes, 1, torch_device, arms=arms, on_stand_in=on_stand_in)
    assert result.wrong == []
    ran = {(row.arm, row.shape.layout) for row in result.rows}
    assert ran >= {(arm, each) for arm in ("one copy", "cupy") for each in LAYOUTS}
