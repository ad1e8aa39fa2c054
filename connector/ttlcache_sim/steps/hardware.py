"""Accelerators that a cell can run on. Adding one: one entry in `HARDWARE`.

Peaks are the vendor's; what a kernel reaches of them is `steptime`'s.
Links are per GPU and direction. GB = 1e9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU and what hangs on it.

    flops: dense bf16 FLOP/s. hbm: bytes/s. link: host link, bytes/s each way.
    ssd_read, ssd_write: bytes/s of one local NVMe drive.
    """

    name: str
    flops: float
    hbm: float
    link: float
    ssd_read: float
    ssd_write: float


#: Sequential rates of a PCIe 4 and a PCIe 5 data-centre drive: Samsung PM1733 and
#: PM1743 product briefs (7.0 / 3.8 GB/s, 14.0 / 6.0 GB/s).
_PCIE4_SSD = (7.0e9, 3.8e9)
_PCIE5_SSD = (14.0e9, 6.0e9)

_ALL = (
    # NVIDIA A100 80GB datasheet (SXM): 312 TFLOP/s bf16, 2,039 GB/s, PCIe 4 x16
    # 64 GB/s both ways together.
    Hardware("a100-80", 312e12, 2.039e12, 32e9, *_PCIE4_SSD),
    # NVIDIA H100 datasheet (SXM): 1,979 TFLOP/s bf16 with sparsity, half of it
    # dense; 3.35 TB/s; PCIe 5 x16 128 GB/s both ways together.
    Hardware("h100", 989.5e12, 3.35e12, 64e9, *_PCIE5_SSD),
    # NVIDIA H200 datasheet (SXM): compute and link as H100, 4.8 TB/s.
    Hardware("h200", 989.5e12, 4.8e12, 64e9, *_PCIE5_SSD),
    # NVIDIA DGX B200 datasheet: 72 PFLOP/s FP8 with sparsity on 8 GPUs, hence
    # 4.5 dense FP8 and 2.25 dense bf16 a GPU; 64 TB/s on 8 GPUs; PCIe 5 x16.
    Hardware("b200", 2250e12, 8.0e12, 64e9, *_PCIE5_SSD),
)
HARDWARE: dict[str, Hardware] = {entry.name: entry for entry in _ALL}
