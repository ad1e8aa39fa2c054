"""Moves KV blocks between the engine's paged memory and host memory.

`layout` says where a block's bytes are, `plan` turns block ids into few large copies,
an engine (`reference`, `cupy_engine`) runs them, `base` is the contract between them.
Only addresses, strides and counts: no torch, no engine. cupy is imported in
`cupy_runtime` alone, when a CUDA engine is asked for.
"""

from __future__ import annotations

from ttlcache.transfer.base import Failure, TransferEngine
from ttlcache.transfer.layout import BlockLayout, PlaneGroup
from ttlcache.transfer.plan import Direction, plan_copies
from ttlcache.transfer.reference import ReferenceEngine

__all__ = [
    "BlockLayout",
    "Direction",
    "Failure",
    "PlaneGroup",
    "ReferenceEngine",
    "TransferEngine",
    "plan_copies",
]
