"""One contract, every engine that runs here."""

import ctypes
import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.csrc import ptx
from tests.transfer.cases import ARENA_BYTES
from tests.transfer.contract import Arena, TransferContract
from tests.transfer.fake_cuda import FakeCuda
from ttlcache.transfer import ReferenceEngine, base
from ttlcache.transfer.base import Failure
from ttlcache.transfer.cupy_engine import CupyEngine, Method
from ttlcache.transfer.host_memory import HostRanges


class TestReference(TransferContract):
    def make_engine(self):
        return ReferenceEngine()

    def test_a_slow_copy_ends_by_itself_and_close_drops_what_has_not_begun(
        self, bench, monkeypatch
    ):
        began, goes_on, memmove = threading.Event(), threading.Event(), ctypes.memmove

        def slow(*piece):
            began.set()
            assert goes_on.wait(10.0)
            memmove(*piece)

        engine, case = bench.engine, bench.case()
        expected = case.expected(*bench.fill(1))[1]
        monkeypatch.setattr(ctypes, "memmove", slow)
        first, second = engine.submit(case.plan()), engine.submit(case.plan())
        assert began.wait(10.0)
        assert not engine.flush(0.01)
        assert engine.poll() == []
        monkeypatch.setattr(base, "CLOSE_TIMEOUT_S", 0.05)
        assert not engine.close()  # its memory must stay
        ended = engine.poll()
        assert [(o.ticket, o.failure) for o in ended] == [(second, Failure.CLOSED)]
        goes_on.set()
        assert engine.flush(10.0)
        assert engine.close()
        np.testing.assert_array_equal(bench.host.read(), expected)
        assert [(o.ticket, o.failure) for o in engine.poll()] == [(first, None)]


@pytest.fixture(scope="module")
def device_code(tmp_path_factory):
    if why := ptx.missing():
        pytest.skip(f"device code not run: {why}")
    return ptx.DeviceCode(tmp_path_factory.mktemp("csrc"))


METHODS = {
    "batch": Method.BATCH,
    "2-D": Method.COPY_2D,
    "single": Method.SINGLE,
    # Run records packed by the engine, read back by the fake's plain copier …
    "kernel": Method.KERNEL,
    # … and by the device code of the real kernels.
    "device code": Method.KERNEL,
    # No calibration, a driver without batch copies, narrow pitches.
    "unmeasured": None,
}


@pytest.mark.parametrize("variant", METHODS)
class TestCupyOnFake(TransferContract):
    """The CUDA engine on a device whose streams run in random order."""

    seeds = itertools.count()

    @pytest.fixture(autouse=True)
    def _device(self, variant, request):
        self.method = METHODS[variant]
        self.runtime = FakeCuda(seed=next(self.seeds))
        if variant == "device code":
            self.runtime.run_kernel = request.getfixturevalue("device_code").run
        if variant == "unmeasured":
            self.runtime.has_batch_copy, self.runtime.max_pitch_bytes = False, 4096

    def make_engine(self):
        self.pinned = HostRanges(self.runtime)
        return CupyEngine(self.runtime, self.pinned, method=self.method)

    def make_arena(self, engine, device):
        if device:
            return Arena(self.runtime.alloc_device(ARENA_BYTES))
        address = self.runtime.alloc_pageable(ARENA_BYTES)
        self.pinned.pin(address, ARENA_BYTES)
        return Arena(address)


def test_the_core_stays_without_cupy_and_torch():
    """Importing the engines imports neither; a process of its own tells."""
    code = (
        "import sys, ttlcache.transfer.cupy_engine, ttlcache.transfer.calibrate, "
        "ttlcache.transfer.cupy_runtime; "
        "print([m for m in ('cupy', 'torch', 'vllm', 'lmcache') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
