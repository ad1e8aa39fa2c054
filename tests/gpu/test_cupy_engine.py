"""The CUDA engine on a CUDA device: contract by every method, order, calibration."""

from __future__ import annotations

import contextlib
import ctypes
import threading

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


class Held:
    """A stream of the model's, whose work waits until `let_go`."""

    def __init__(self, runtime):
        self.runtime, self.gate = runtime, threading.Event()
        self.handle = runtime.create_stream()

    def __cuda_stream__(self):
        return 0, self.handle

    def hold(self):
        import cupy

        self.gate.clear()
        stream = cupy.cuda.Stream.from_external(self)
        stream.launch_host_func(lambda _: self.gate.wait(WAIT_S), None)

    def let_go(self):
        self.gate.set()

    def fill(self, address, value):
        memory = (address, value, ARENA_BYTES)
        self.runtime._call("memsetAsync", *memory, self.handle)

    def record(self):
        event = self.runtime.create_event()
        self.runtime.record(event, self.handle)
        return event


@contextlib.contextmanager
def sides(runtime, method=None):
    """An engine, a device arena, a pinned one and a stream; the engine goes first."""
    pinned = PinnedRanges(runtime)
    engine = CupyEngine(runtime, pinned, method=method)
    device, stream = DeviceArena(runtime), Held(runtime)
    try:
        yield engine, device, PinnedArena(pinned), stream
    finally:
        stream.let_go()
        engine.close()
        pinned.close()
        runtime.destroy_stream(stream.handle)
        device.free()


class OnDevice(TransferContract):
    method = None

    @pytest.fixture(autouse=True)
    def _device(self, runtime):
        self.runtime, self.arenas = runtime, []
        self.pinned = PinnedRanges(runtime)
        yield
        self.pinned.close()
        for arena in self.arenas:
            arena.free()

    def make_engine(self):
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


@pytest.fixture(scope="module")
def ranking(runtime):
    return calibrate(runtime)


class TestChosen(OnDevice):
    @pytest.fixture(autouse=True)
    def _ranking(self, ranking):
        self.ranking = ranking

    def make_engine(self):
        return CupyEngine(self.runtime, self.pinned, self.ranking)


def test_calibration_ranks_every_method(ranking):
    for probe, costs in ranking.cost.items():
        assert set(costs) >= set(CANDIDATES) - {Method.BATCH}, ranking.faults
        assert all(0 < cost < 1e-6 for cost in costs.values()), (probe, costs)


@pytest.mark.parametrize("method", [Method.COPY_2D, Method.KERNEL_8, Method.BATCH])
def test_a_store_waits_for_the_work_before_its_event(runtime, method):
    """The stream is held before it writes the block: the store must not be early."""
    if method is Method.BATCH and not runtime.has_batch_copy:
        pytest.skip("not run: the driver has no cuMemcpyBatchAsync")
    with sides(runtime, method) as (engine, pool, host, stream):
        case = example_case(pool.address, host.address)
        for value in range(5):
            if value:  # the first one loads the kernel, which may wait for the device
                stream.hold()
            stream.fill(pool.address, value)
            event = stream.record()
            engine.submit(case.plan(), after=event)
            if value:
                threading.Event().wait(0.02)
                assert engine.poll() == []
                stream.let_go()
            assert engine.flush(WAIT_S)
            (outcome,) = engine.poll()
            assert outcome.ok
            assert outcome.seconds > 0
            runtime.destroy_event(event)
            stored = ctypes.string_at(host.address, case.num_bytes // 5)
            assert set(stored) == {value}


@pytest.mark.parametrize("method", [Method.COPY_2D, Method.KERNEL_8, None])
def test_a_load_is_reported_when_its_bytes_are_there(runtime, method):
    with sides(runtime, method) as (engine, pool, host, _):
        case = example_case(pool.address, host.address, direction=Direction.LOAD)
        for value in range(1, 10):
            ctypes.memset(host.address, value, ARENA_BYTES)
            engine.submit(case.plan())
            assert engine.flush(WAIT_S)
            assert engine.poll()[0].ok
            assert set(pool.read()[3 * 1040 : 4 * 1040].tolist()) == {value}


def test_a_fault_is_reported_when_nothing_copies_any_more(runtime, monkeypatch):
    with sides(runtime) as (engine, pool, host, _):
        ctypes.memset(host.address, 7, ARENA_BYTES)
        record, calls = runtime.record, []

        def fail_for_the_part(event, stream):
            calls.append(event)
            if len(calls) == 2:
                raise RuntimeError("no event")
            record(event, stream)

        monkeypatch.setattr(runtime, "record", fail_for_the_part)
        case = example_case(pool.address, host.address, direction=Direction.LOAD)
        engine.submit(case.plan())
        assert engine.flush(WAIT_S)
        assert engine.poll()[0].failure is Failure.BROKEN
        assert set(pool.read()[3 * 1040 : 4 * 1040].tolist()) == {7}


def test_unpinned_memory_is_refused_and_the_device_lives_on(runtime):
    engine = CupyEngine(runtime, PinnedRanges(runtime), method=Method.KERNEL_8)
    arena, device = Arena(), DeviceArena(runtime)
    engine.submit(example_case(device.address, arena.address).plan())
    assert engine.poll()[0].failure is Failure.NOT_PINNED
    device.write(np.ones(ARENA_BYTES, np.uint8))
    engine.close()
    device.free()


def test_submitting_does_not_wait_for_the_copy(runtime):
    """The caller is back while the stream before it is still held."""
    with sides(runtime) as (engine, pool, host, stream):
        stream.hold()
        event = stream.record()
        engine.submit(example_case(pool.address, host.address).plan(), after=event)
        assert engine.poll() == []
        stream.let_go()
        assert engine.flush(WAIT_S)
        assert engine.poll()[0].ok
        runtime.destroy_event(event)
