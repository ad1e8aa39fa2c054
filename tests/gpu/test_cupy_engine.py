"""The CUDA engine on a CUDA device: contract by every method, order, calibration."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.transfer.cases import ARENA_BYTES, example_case
from tests.transfer.contract import Arena, TransferContract
from ttlcache.transfer import Direction, Failure
from ttlcache.transfer.calibrate import CANDIDATES, calibrate
from ttlcache.transfer.cupy_engine import CupyEngine, Method
from ttlcache.transfer.host_memory import PinnedRanges

pytestmark = pytest.mark.gpu
WAIT_S = 60.0


class DeviceArena(Arena):
    """Device memory, read and written with synchronous copies."""

    def __init__(self, runtime):
        self.runtime, self.num_bytes = runtime, ARENA_BYTES
        self.address = runtime.alloc_device(ARENA_BYTES)

    def write(self, data):
        self.runtime._call("memcpy", self.address, data.ctypes.data, self.num_bytes, 1)
        self.runtime._call("deviceSynchronize")  # pageable: it may return before

    def read(self):
        data = np.empty(self.num_bytes, np.uint8)
        self.runtime._call("memcpy", data.ctypes.data, self.address, self.num_bytes, 2)
        return data

    def free(self):
        self.runtime.free_device(self.address)


class PinnedArena(Arena):
    def __init__(self, pinned):
        super().__init__()
        # Whole pages: what registering wants.
        raw = np.zeros(ARENA_BYTES + 8192, np.uint8)
        self._array, self.address = raw, -(-raw.ctypes.data // 4096) * 4096
        pinned.pin(self.address, ARENA_BYTES)


class OnDevice(TransferContract):
    method = None

    @pytest.fixture(autouse=True)
    def _device(self, runtime):
        self.runtime, self.arenas = runtime, []
        yield
        for arena in self.arenas:
            arena.free()

    def make_engine(self):
        self.pinned = PinnedRanges(self.runtime)
        return CupyEngine(self.runtime, self.pinned, method=self.method)

    def make_arena(self, engine, device):
        if not device:
            return PinnedArena(self.pinned)
        self.arenas.append(DeviceArena(self.runtime))
        return self.arenas[-1]


class TestCopy2d(OnDevice):
    method = Method.COPY_2D


class TestKernel8(OnDevice):
    method = Method.KERNEL_8


class TestKernel32(OnDevice):
    method = Method.KERNEL_32


class TestBatch(OnDevice):
    method = Method.BATCH

    @pytest.fixture(autouse=True)
    def _has_batch(self, runtime):
        if not runtime.has_batch_copy:
            pytest.skip("not run: the driver has no cuMemcpyBatchAsync")


class TestChosen(OnDevice):
    def make_engine(self):
        self.pinned = PinnedRanges(self.runtime)
        return CupyEngine(self.runtime, self.pinned, calibrate(self.runtime))


def test_calibration_ranks_every_method(runtime):
    ranking = calibrate(runtime)
    for probe, costs in ranking.cost.items():
        assert set(costs) >= set(CANDIDATES) - {Method.BATCH}, ranking.faults
        assert all(0 < cost < 1e-6 for cost in costs.values()), (probe, costs)


@pytest.mark.parametrize("method", [Method.COPY_2D, Method.KERNEL_8, Method.BATCH])
def test_a_store_waits_for_the_work_before_its_event(runtime, method):
    """A long chain of device work writes the block last; the store must see that."""
    if method is Method.BATCH and not runtime.has_batch_copy:
        pytest.skip("not run: the driver has no cuMemcpyBatchAsync")
    import cupy

    pinned = PinnedRanges(runtime)
    engine, host = CupyEngine(runtime, pinned, method=method), PinnedArena(pinned)
    pool = cupy.zeros(ARENA_BYTES, cupy.uint8)
    work = cupy.random.random((2048, 2048), dtype=cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    case = example_case(pool.data.ptr, host.address)
    cupy.cuda.Device().synchronize()
    for value in range(1, 6):
        with stream:
            for _ in range(40):
                work = work @ work
                work /= cupy.abs(work).max()
            pool[:] = value
        event = cupy.cuda.Event()
        event.record(stream)
        engine.submit(case.plan(), after=event.ptr)
        assert engine.flush(WAIT_S)
        (outcome,) = engine.poll()
        assert outcome.ok
        assert outcome.seconds > 0
        stored = ctypes.string_at(host.address, case.num_bytes // 5)
        assert set(stored) == {value}
    engine.close()


def test_a_load_is_reported_when_its_bytes_are_there(runtime):
    import cupy

    pinned = PinnedRanges(runtime)
    engine, host = CupyEngine(runtime, pinned), PinnedArena(pinned)
    pool = cupy.zeros(ARENA_BYTES, cupy.uint8)
    cupy.cuda.Device().synchronize()
    case = example_case(pool.data.ptr, host.address, direction=Direction.LOAD)
    for value in range(1, 20):
        ctypes.memset(host.address, value, ARENA_BYTES)
        engine.submit(case.plan())
        assert engine.flush(WAIT_S)
        assert engine.poll()[0].ok
        assert set(pool[3 * 1040 : 4 * 1040].get().tolist()) == {value}
    engine.close()


def test_unpinned_memory_is_refused_and_the_device_lives_on(runtime):
    engine = CupyEngine(runtime, PinnedRanges(runtime), method=Method.KERNEL_8)
    arena, device = Arena(), DeviceArena(runtime)
    engine.submit(example_case(device.address, arena.address).plan())
    assert engine.poll()[0].failure is Failure.NOT_PINNED
    device.write(np.ones(ARENA_BYTES, np.uint8))
    engine.close()
    device.free()


def test_submitting_does_not_wait_for_the_copy(runtime):
    """The caller is back while the device is still busy with the work before."""
    import cupy

    pinned = PinnedRanges(runtime)
    engine, host = CupyEngine(runtime, pinned), PinnedArena(pinned)
    pool = cupy.zeros(ARENA_BYTES, cupy.uint8)
    work = cupy.random.random((4096, 4096), dtype=cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(50):
            work = work @ work
            work /= cupy.abs(work).max()
    event = cupy.cuda.Event()
    event.record(stream)
    engine.submit(example_case(pool.data.ptr, host.address).plan(), after=event.ptr)
    assert engine.poll() == []
    assert not event.done
    assert engine.flush(WAIT_S)
    assert engine.poll()[0].ok
    engine.close()
