"""Order by events: what may overtake what, on a device that tries everything."""

import ctypes

import pytest

from tests.transfer.fake_cuda import FakeCuda
from ttlcache.transfer import BlockLayout, Direction, Failure, cupy_engine, plan_copies
from ttlcache.transfer.calibrate import CANDIDATES, calibrate
from ttlcache.transfer.cuda import CudaError
from ttlcache.transfer.cupy_engine import CupyEngine, Method, Probe, Ranking
from ttlcache.transfer.host_memory import HostRanges
from ttlcache.transfer.layout import Plane

LAYERS, BLOCKS, PIECE, PER_CHUNK = 4, 16, 512, 4
POOL = LAYERS * BLOCKS * PIECE
CHUNK = LAYERS * PER_CHUNK * PIECE
STORE, LOAD = Direction.STORE, Direction.LOAD
METHODS = (Method.BATCH, Method.COPY_2D, Method.KERNEL)
SEEDS = range(12)


class Device:
    """A pool, a host buffer, a forward stream and the engine under test."""

    def __init__(self, seed=0, method=Method.BATCH, **fake):
        self.cuda = FakeCuda(seed=seed, **fake)
        self.pinned = HostRanges(self.cuda)
        self.engine = CupyEngine(self.cuda, self.pinned, method=method)
        self.pool = self.cuda.alloc_device(POOL)
        self.host = self.cuda.alloc_host(4 * CHUNK)
        self.pinned.adopt(self.host, 4 * CHUNK)
        self.forward = self.cuda.create_stream()
        layers = range(self.pool, self.pool + POOL, BLOCKS * PIECE)
        planes = [Plane(layer, PIECE, PIECE) for layer in layers]
        self.layout = BlockLayout.from_planes("test", BLOCKS, planes)

    def plan(self, direction, ids, address=None):
        chunks = [self.host if address is None else address]
        return plan_copies(direction, self.layout, ids, chunks, PER_CHUNK)

    def submit(self, direction, ids, after=None):
        self.engine.submit(self.plan(direction, ids), after=after)

    def fill(self, address, size, value):
        ctypes.memset(address, value, size)

    def block(self, block):
        """The set of byte values in a block."""
        found = set()
        for layer in range(LAYERS):
            at = self.pool + (layer * BLOCKS + block) * PIECE
            found |= set(ctypes.string_at(at, PIECE))
        return found

    def chunk(self):
        return set(ctypes.string_at(self.host, CHUNK))

    def run_forward(self, work):
        """A forward pass that does `work`; its event."""
        self.cuda.enqueue(self.forward, work)
        event = self.cuda.create_event()
        self.cuda.record(event, self.forward)
        return event

    def write_forward(self, value):
        """A forward pass that writes the whole pool; its event."""
        return self.run_forward(lambda: self.fill(self.pool, POOL, value))

    def finish(self):
        assert self.engine.flush(60)
        return self.engine.poll()


@pytest.fixture(params=[(m, s) for m in METHODS for s in SEEDS], ids=str)
def device(request):
    method, seed = request.param
    return Device(seed, method)


def test_a_store_waits_for_the_forward_pass_that_writes_its_blocks(device):
    device.submit(STORE, [3, 4, 9, 1], after=device.write_forward(7))
    (outcome,) = device.finish()
    assert outcome.ok
    assert device.chunk() == {7}


def test_a_load_is_reported_when_its_bytes_are_there(device):
    device.fill(device.host, CHUNK, 9)
    device.submit(LOAD, [3, 4, 9, 1])
    while not (outcomes := device.engine.poll()):
        pass
    assert outcomes[0].ok
    assert device.block(9) == {9}


def test_without_the_event_the_order_is_lost():
    """The fake is adversarial enough for the first test to mean something."""
    stale = 0
    for seed in range(40):
        device = Device(seed)
        device.write_forward(7)
        device.submit(STORE, [3, 4, 9, 1])
        device.finish()
        stale += device.chunk() != {7}
    assert stale > 0


def test_few_parts_are_on_the_stream_at_once(monkeypatch):
    """And never none while there are more: the next is issued before the wait."""
    monkeypatch.setattr(cupy_engine, "PART_BYTES", PIECE)
    device, most = Device(), cupy_engine.PARTS_IN_FLIGHT
    device.submit(STORE, [1, 3, 5, 7])
    (outcome,) = device.finish()
    assert outcome.ok
    on_stream, seen = 0, []
    for call in device.cuda.calls:
        on_stream += (call == "copy_batch") - (call == "wait")
        seen.append(on_stream)
    assert max(seen) == most
    first, last = seen.index(most), len(seen) - seen[::-1].index(most)
    assert min(seen[first:last]) == most - 1


def test_steady_state_allocates_nothing_and_close_gives_everything_back(device):
    def allocated():
        calls = device.cuda.calls
        return device.cuda.live_allocations, calls.count("create_event")

    seen = set()
    for _ in range(11):
        for direction in Direction:
            device.submit(direction, [1, 2, 5])
            device.finish()
        seen.add(allocated())
    assert len(seen) == 1
    device.submit(STORE, [1, 2])
    device.engine.close()
    assert len(device.engine.poll()) == 1
    assert device.cuda.live_allocations == 2  # the test's own pool and buffer


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("call", ["copy_batch", "copy_2d", "launch", "stream_wait"])
def test_a_failed_call_is_a_failed_outcome_and_the_next_plan_works(method, call):
    device = Device(1, method, fail={call: 1})
    event = device.write_forward(7)
    device.submit(STORE, [3, 4, 9, 1], after=event)
    (outcome,) = device.finish()
    hit = call not in device.cuda.fail
    assert hit == (not outcome.ok)
    if hit:
        assert outcome.failure is Failure.DEVICE_ERROR
        assert call in outcome.detail
    device.cuda.fail.clear()
    device.submit(STORE, [3, 4, 9, 1], after=event)
    (outcome,) = device.finish()
    assert outcome.ok
    assert device.chunk() == {7}


def test_a_failure_is_not_reported_before_its_copies_have_stopped():
    """The second 2-D copy is refused; the first one still uses the buffers."""
    device = Device(method=Method.COPY_2D, fail={"copy_2d": 2})
    gate = []
    device.submit(LOAD, [1, 3], after=device.run_forward(lambda: gate.append(1)))
    while not (seen := device.engine.poll()):
        pass
    assert gate
    assert not seen[0].ok


def test_if_no_event_can_be_recorded_the_engine_is_broken():
    device = Device(fail={"record": 2})  # begun is recorded, done is not
    device.submit(STORE, [1])
    device.submit(STORE, [2])
    outcomes = device.finish()
    assert [outcome.failure for outcome in outcomes] == [Failure.BROKEN] * 2
    assert not any(device.cuda._streams.values())  # nothing copies any more


def test_an_error_of_the_device_ends_all_plans_and_later_ones_at_once():
    device = Device()
    gate = device.run_forward(lambda: setattr(device.cuda, "broken", "an address"))
    for direction in (*Direction, *Direction):
        device.submit(direction, [1, 2], after=gate)
    outcomes = device.finish()
    assert [outcome.failure for outcome in outcomes] == [Failure.BROKEN] * 4
    device.submit(STORE, [1])
    assert device.engine.poll()[0].failure is Failure.BROKEN
    device.engine.close()


@pytest.mark.parametrize("has_batch", [True, False])
def test_without_memory_for_a_kernels_runs_there_are_other_ways(has_batch):
    device = Device(method=Method.KERNEL)
    device.cuda.has_batch_copy = has_batch
    device.fill(device.host, CHUNK, 9)
    device.cuda.fail["alloc_device"] = 1
    device.submit(LOAD, [3, 4, 9, 1])
    assert device.finish()[0].ok
    assert device.block(9) == {9}


def test_unpinned_host_memory_is_refused():
    device = Device(method=Method.KERNEL)
    pageable = device.cuda.alloc_pageable(CHUNK)
    plans = [
        device.plan(direction, [1], place)
        for direction in Direction
        # Outside, and reaching out of a pinned range at its end.
        for place in (pageable, device.host + 4 * CHUNK - PIECE)
    ]
    for plan in plans:
        device.engine.submit(plan)
        assert device.engine.poll()[0].failure is Failure.NOT_PINNED
    device.pinned.pin(pageable, CHUNK)
    for plan in plans[::2]:
        device.engine.submit(plan)
        assert device.finish()[0].ok
    device.pinned.release(pageable)
    device.engine.submit(plans[0])
    assert device.engine.poll()[0].failure is Failure.NOT_PINNED


@pytest.fixture(scope="module")
def ranking():
    return calibrate(FakeCuda(seed=3))


@pytest.mark.parametrize("sees_host", [True, False])
def test_what_the_device_cannot_do_is_not_chosen(ranking, sees_host):
    """Wide pitches, no batch copies, kernels that cannot see the host."""
    lacks = {"has_batch_copy": False, "kernels_reach_host": sees_host}
    device = Device(method=None, max_pitch_bytes=PIECE, **lacks)
    ranked = CupyEngine(device.cuda, device.pinned, ranking)
    for engine in (device.engine, ranked):
        engine.submit(device.plan(STORE, [1, 3]))
        assert engine.flush(60)
        assert engine.poll()[0].ok
    assert device.cuda.calls.count("copy_batch") == 0
    assert (device.cuda.calls.count("launch") > 0) == sees_host
    found = set().union(*calibrate(FakeCuda(**lacks)).cost.values())
    assert found - {Method.COPY_2D} == ({Method.KERNEL} if sees_host else set())


def test_calibration_ranks_what_this_device_can_do(ranking):
    assert {p.direction for p in ranking.cost} == set(Direction)
    small = ranking.order(LOAD, True, 1_000)
    assert set(small) == set(CANDIDATES)
    # One call a piece is the worst of all for small flat pieces.
    assert small[-1] is Method.COPY_2D


@pytest.mark.parametrize(
    ("dear", "flat"),
    [(Method.KERNEL, False), (Method.KERNEL, True), (Method.COPY_2D, True)],
)
def test_what_holds_up_the_model_or_the_thread_must_win_clearly(dear, flat):
    def first(cost):
        costs = {Method.BATCH: 1.0, dear: cost}
        return Ranking({Probe(STORE, flat, 1 << 17): costs}).order(STORE, flat, 1 << 17)

    assert [first(cost)[0] for cost in (0.95, 0.5)] == [Method.BATCH, dear]


def test_a_method_that_fails_is_not_ranked_and_the_others_are():
    ranking = calibrate(FakeCuda(fail={"launch": 1}))
    assert list(ranking.faults) == [Method.KERNEL.value]
    others = {*CANDIDATES} - {Method.KERNEL}
    assert set(ranking.order(LOAD, True, 1_000)) == others


def test_without_memory_there_is_no_calibration_and_nothing_leaks():
    fake = FakeCuda(fail={"alloc_host": 1})
    with pytest.raises(CudaError):
        calibrate(fake)
    assert fake.live_allocations == 0
