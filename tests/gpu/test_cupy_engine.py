"""The CUDA engine on a CUDA device: contract by every method, order, calibration."""

import contextlib
import ctypes
import threading

import numpy as np
import pytest

from tests.transfer.cases import ARENA_BYTES, example_case
from tests.transfer.contract import Arena, Bench, TransferContract
from ttlcache.transfer import Direction, Failure
from ttlcache.transfer.calibrate import CANDIDATES, calibrate
from ttlcache.transfer.cupy_engine import CupyEngine, Method
from ttlcache.transfer.host_memory import HostRanges

pytestmark = pytest.mark.gpu
WAIT_S = 60.0


class DeviceArena(Arena):
    """Device memory, read and written with synchronous copies."""

    def __init__(self, runtime):
        super().__init__(runtime.alloc_device(ARENA_BYTES))
        self.runtime = runtime

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
def sides(runtime, method=None, ranking=None):
    """An engine, a device arena, a pinned one and a stream; the engine goes first."""
    pinned = HostRanges(runtime)
    engine = CupyEngine(runtime, pinned, ranking, method=method)
    device, stream = DeviceArena(runtime), Held(runtime)
    try:
        yield engine, device, PinnedArena(pinned), stream
    finally:
        stream.let_go()
        engine.close()
        pinned.close()
        runtime.destroy_stream(stream.handle)
        device.free()


def skip_without(runtime, method):
    if method is Method.BATCH and not runtime.has_batch_copy:
        pytest.skip("not run: the driver has no cuMemcpyBatchAsync")


@pytest.fixture(scope="module")
def ranking(runtime):
    return calibrate(runtime)


#: None: the one that calibration found best.
METHODS = (Method.COPY_2D, Method.KERNEL, Method.BATCH, None)


@pytest.mark.parametrize("method", METHODS, ids=str)
class TestOnDevice(TransferContract):
    @pytest.fixture
    def bench(self, runtime, ranking, method):
        skip_without(runtime, method)
        with sides(runtime, method, ranking) as (engine, device, pinned, _):
            yield Bench(engine, device, pinned)


def test_calibration_ranks_every_method(ranking):
    for probe, costs in ranking.cost.items():
        assert set(costs) >= set(CANDIDATES) - {Method.BATCH}, ranking.faults
        assert all(0 < cost < 1e-6 for cost in costs.values()), (probe, costs)


@pytest.mark.parametrize("method", [Method.COPY_2D, Method.KERNEL, Method.BATCH])
def test_a_store_waits_for_the_work_before_its_event(runtime, method):
    """The stream is held before it writes the block: the store must not be early."""
    skip_without(runtime, method)
    with sides(runtime, method) as (engine, pool, host, stream):
        case = example_case(pool.address, host.address)
        for value in range(5):
            if value:  # the first one loads the kernel, which may wait for the device
                stream.hold()
            stream.fill(pool.address, value)
            event = stream.record()
            engine.submit(case.plan(), after=event)
            if value:
                # The caller is back while the stream before it is still held.
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


@pytest.mark.parametrize("method", [Method.COPY_2D, Method.KERNEL, None])
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
