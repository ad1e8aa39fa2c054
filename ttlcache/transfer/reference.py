"""Host to host, plain: the engine of CPU builds, and what the others are checked by.

ctypes lets go of the interpreter's lock while it copies.
"""

from __future__ import annotations

import ctypes

from ttlcache.clock import stopwatch_s
from ttlcache.transfer.base import PART_BYTES, Failure, Job, TransferEngine


class ReferenceEngine(TransferEngine):
    """Copies with the C library's memmove, piece by piece."""

    name = "reference"

    def _check(self, job: Job) -> None:
        if job.after:
            job.fail(Failure.INVALID_PLAN, "no device events without a device")

    def _run(self, job: Job) -> None:
        began_s = stopwatch_s()
        try:
            for part in job.plan.parts(PART_BYTES):
                if not job.is_wanted():
                    job.fail(Failure.CANCELLED, "not wanted any more")
                    break
                pieces = part.pieces
                columns = pieces.dst.tolist(), pieces.src.tolist(), pieces.size.tolist()
                for dst, src, size in zip(*columns, strict=True):
                    ctypes.memmove(dst, src, size)
        except Exception as error:  # noqa: BLE001 - every plan has an outcome
            job.fail(Failure.DEVICE_ERROR, repr(error))
        self._end(job, stopwatch_s() - began_s)
