"""One contract, every engine that runs here."""

from __future__ import annotations

import itertools
import sys

import pytest

from tests.csrc import ptx
from tests.transfer.cases import ARENA_BYTES
from tests.transfer.contract import Arena, TransferContract
from tests.transfer.fake_cuda import FakeCuda
from ttlcache.transfer import ReferenceEngine
from ttlcache.transfer.cupy_engine import CupyEngine, Method
from ttlcache.transfer.host_memory import PinnedRanges


class TestReference(TransferContract):
    def make_engine(self):
        return ReferenceEngine()


class FakeArena(Arena):
    """Memory that the fake device knows."""

    def __init__(self, address):
        self.address, self.num_bytes = address, ARENA_BYTES


class CupyOnFake(TransferContract):
    """The CUDA engine on a device whose streams run in random order."""

    method = None
    seeds = itertools.count()

    def make_runtime(self):
        return FakeCuda(seed=next(self.seeds))

    def make_engine(self):
        self.runtime = self.make_runtime()
        self.pinned = PinnedRanges(self.runtime)
        return CupyEngine(self.runtime, self.pinned, method=self.method)

    def make_arena(self, engine, device):
        if device:
            return FakeArena(self.runtime.alloc_device(ARENA_BYTES))
        address = self.runtime.alloc_pageable(ARENA_BYTES)
        self.pinned.pin(address, ARENA_BYTES)
        return FakeArena(address)


class TestCupyBatch(CupyOnFake):
    method = Method.BATCH


class TestCupyCopy2d(CupyOnFake):
    method = Method.COPY_2D


class TestCupyKernel(CupyOnFake):
    """Run records packed by the engine, read back by the fake's plain copier."""

    method = Method.KERNEL_8


@pytest.fixture(scope="module")
def device_code(tmp_path_factory):
    if why := ptx.missing():
        pytest.skip(f"device code not run: {why}")
    return ptx.DeviceCode(tmp_path_factory.mktemp("csrc"))


class TestCupyDeviceCode(CupyOnFake):
    """The same, carried out by the device code of the real kernels."""

    method = Method.KERNEL_8

    @pytest.fixture(autouse=True)
    def _code(self, device_code):
        self.code = device_code

    def make_runtime(self):
        fake = super().make_runtime()
        fake.run_kernel = self.code.run
        return fake


class TestCupySingle(CupyOnFake):
    method = Method.SINGLE


class TestCupyUnmeasured(CupyOnFake):
    """No calibration, a driver without batch copies, narrow pitches."""

    def make_runtime(self):
        fake = super().make_runtime()
        fake.has_batch_copy, fake.max_pitch_bytes = False, 4096
        return fake


def test_the_core_stays_without_cupy_and_torch():
    """Importing the engines imports neither; a process of its own tells."""
    import subprocess

    code = (
        "import sys, ttlcache.transfer.cupy_engine, ttlcache.transfer.calibrate, "
        "ttlcache.transfer.cupy_runtime; "
        "print([m for m in ('cupy', 'torch', 'vllm', 'lmcache') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
