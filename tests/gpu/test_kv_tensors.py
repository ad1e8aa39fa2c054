"""vLLM's CUDA layouts on a CUDA device: out to pinned chunks and back."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "layout", ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC"]
)
def test_every_arm_moves_every_byte(runtime, layout):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("not run: torch sees no CUDA device")
    pytest.importorskip("vllm")
    from bench.micro.transfer_arms import make_arms
    from bench.micro.transfer_memory import CellShape
    from bench.micro.transfer_run import run

    device = torch.device("cuda", 0)
    arms, _ = make_arms(device)
    shapes = [CellShape(layout, page << 10, 3, 4, 8 << 20) for page in (4, 64)]
    result = run(shapes, 1, device, arms=arms)
    assert result.num_wrong == 0, result.skipped
    assert {row.arm for row in result.rows} >= {"one copy", "cupy"}
