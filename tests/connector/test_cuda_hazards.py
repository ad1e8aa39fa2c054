"""What only a device can get wrong, on a made-up device."""

import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lmcache")

from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.connector.test_kv_layouts import FULL, fill, one_group, registered
from tests.connector.test_lower_copiers import (
    HINTS,
    Threaded,
    engines_of,
    shared_memory_server,
)
from tests.transfer.fake_cuda import FakeCuda
from ttlcache.transfer.cuda import CudaError
from ttlcache_connector.tiers.lmcache import copier as copier_module
from ttlcache_connector.tiers.lmcache.copier import ChunkCopier


class ThreadedCuda(FakeCuda):
    """Knows which threads have a device, and that fresh events have no time."""

    def __post_init__(self):
        super().__post_init__()
        self.active = set()
        self.bare = []

    def activate(self):
        super().activate()
        self.active.add(threading.get_ident())

    def need_device(self, what):
        if threading.get_ident() not in self.active:
            self.bare.append(what)

    def unpin(self, address):
        self.need_device("cudaHostUnregister")
        super().unpin(address)

    def elapsed_s(self, first, last):
        if not self._events[first].recorded:  # cudaErrorInvalidResourceHandle
            raise CudaError("elapsed_s: an event that was never recorded")
        return super().elapsed_s(first, last)


@pytest.fixture
def made(monkeypatch):
    cuda = ThreadedCuda(seed=3)
    monkeypatch.setattr(copier_module, "make_engines", lambda _: engines_of(cuda))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: cuda.activate())
    caches, config = registered(KVCacheLayout.LBHNC, one_group(FULL))
    pool = fill(caches)
    with shared_memory_server() as server:
        cuda.take_over(pool.data_ptr(), pool.numel(), "device")
        real = server.context

        def context():
            made_context = real()
            first = made_context._make_tensor_view(0, 1, [1], "uint8").data_ptr()
            cuda.take_over(first, len(server.memory), "pageable")
            return made_context

        server.context = context
        copier = ChunkCopier.of(caches, config, HINTS)
        moves = Threaded(server, copier)
        yield SimpleNamespace(
            cuda=cuda, caches=caches, moves=moves, memory=server.memory, pool=pool
        )
        moves.threads.close()


def test_the_mover_has_a_device_before_its_first_cuda_call(made):
    """Else rank 1 … 7 open a context on GPU 0: half a gigabyte each."""
    made.moves._device = torch.device("cuda", 0)

    class Event:  # torch's is no fake's; cudaEventSynchronize needs a current device
        def synchronize(self):
            made.cuda.need_device("cudaEventSynchronize")

    assert made.moves.store(made.caches, Event())
    assert made.cuda.bare == []


def test_memory_is_unpinned_on_a_thread_that_has_a_device(made):
    """LMCache's heartbeat thread re-registers."""
    thread = threading.Thread(target=made.moves._copier.detach)
    thread.start()
    thread.join()
    assert made.cuda.bare == []


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_plan_that_never_began_is_not_a_success(made, direction):
    """`record(begun)` fails on a fresh event; `done` is recorded and reached."""
    made.cuda.fail["record"] = 1
    assert not getattr(made.moves, direction)(made.caches)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_on_a_device_nothing_is_copied_without_an_event(made, direction):
    """The adapter gives none while its server is away, which ends at any moment."""
    made.moves._device = torch.device("cuda", 0)
    before = made.pool.clone()
    assert not getattr(made.moves, direction)(made.caches)
    assert torch.equal(made.pool, before)
    assert not any(bytes(made.memory))
