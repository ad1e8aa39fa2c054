"""Our transfer path on LMCache's shared memory, also on a device that is made up."""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.base import EngineDrivenContextMetadata
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.connector.test_kv_layouts import FULL, LAYERS, fill, one_group, registered
from tests.transfer.fake_cuda import FakeCuda
from ttlcache.errors import ConfigError, TransferError
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.transfer import Direction, ReferenceEngine
from ttlcache.transfer.cupy_engine import CupyEngine
from ttlcache.transfer.host_memory import HostRanges
from ttlcache_connector.copy.engines import CopyEngines
from ttlcache_connector.tiers.lmcache import copier as copier_module
from ttlcache_connector.tiers.lmcache import registration
from ttlcache_connector.tiers.lmcache.copier import ChunkCopier
from ttlcache_connector.tiers.lmcache.copy_thread import CopyThreads
from ttlcache_connector.tiers.lmcache.worker_transfer import ThreadedTransfer

WAIT_S = 60.0
BLOCKS = [3, 1, 2, 9, 8, 4, 7, 6]
PER_CHUNK, CHUNKS = 2, 4
HINTS = {"kv_layout": "HND"}
SHAPE = torch.Size([LAYERS, PER_CHUNK * 16, 4 * 16])
CHUNK_BYTES = SHAPE.numel() * 2


class Server:
    """Answers what LMCache's server answers, at once, from memory of its own."""

    def __init__(self, name: str, memory: mmap.mmap) -> None:
        self.name, self.memory = name, memory

    def context(self) -> EngineDrivenContextShm:
        layout = MemoryLayoutDesc(shapes=[SHAPE], dtypes=[torch.bfloat16])
        metadata = EngineDrivenContextMetadata(layout, block_size=16, use_mla=True)
        size = len(self.memory)
        return EngineDrivenContextShm(metadata, self, WAIT_S, self.name, size)

    def slots(self) -> list[dict[str, Any]]:
        alike = {"length": CHUNK_BYTES, "shape": list(SHAPE), "dtype": "bfloat16"}
        return [{"offset": i * CHUNK_BYTES, **alike} for i in range(CHUNKS)]

    def prepare_store(self, *_: object) -> Any:
        answer = {"slots": self.slots(), "chunk_indices": list(range(CHUNKS))}
        return _answered(SimpleNamespace(context=answer))

    def prepare_retrieve(self, *_: object) -> Any:
        context = {"slots": self.slots()}
        return _answered(SimpleNamespace(success=True, context=context))

    def commit_store(self, *_: object) -> Any:
        return _answered(True)

    commit_retrieve = commit_store


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Random bytes are not equal to themselves as floats."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def _answered(value: Any) -> MessagingFuture[Any]:
    future: MessagingFuture[Any] = MessagingFuture()
    future.set_result(value)
    return future


@contextlib.contextmanager
def shared_memory_server() -> Iterator[Server]:
    path = Path("/dev/shm", f"ttlcache-test-{uuid.uuid4().hex}")
    with path.open("xb+") as file:
        file.truncate(CHUNKS * CHUNK_BYTES)
        try:
            yield Server(path.name, mmap.mmap(file.fileno(), CHUNKS * CHUNK_BYTES))
        finally:
            path.unlink()


@pytest.fixture
def server() -> Iterator[Server]:
    with shared_memory_server() as answering:
        yield answering


@pytest.fixture
def tensors() -> tuple[Any, Any]:
    return registered(KVCacheLayout.LBHNC, one_group(FULL))


@pytest.fixture
def caches(tensors: tuple[Any, Any]) -> Any:
    return tensors[0]


@pytest.fixture
def threaded(server: Server, tensors: tuple[Any, Any]) -> Iterator[Any]:
    """Makes transfers of these tensors; their threads end with the test."""
    made: list[Threaded] = []

    def make(at: Any = server) -> Threaded:
        made.append(Threaded(at, ChunkCopier.of(*tensors, HINTS)))
        return made[-1]

    yield make
    for each in made:
        each.threads.close()


class Threaded(ThreadedTransfer):
    """Registered without a server's answer."""

    def __init__(self, server: Server, copier: Any, kv_caches: Any = None) -> None:
        self.threads = CopyThreads()
        self.unanswered: list[Any] = []
        super().__init__(
            *(7, server, self.threads, MetricsBuffer(), WAIT_S, copier),
            lambda: self.unanswered.append(server),
        )
        self._engine_driven_context = server.context()
        copier.attach(self._engine_driven_context)
        if kv_caches is not None:
            self._device = next(iter(kv_caches.values())).device

    def store(self, caches: Any, event: Any = None) -> bool:
        args = ("r", None, caches, [BLOCKS], event, PER_CHUNK)
        return self.moved(self.submit_store(*args))

    def load(self, caches: Any, event: Any = None, skip_tokens: int = 0) -> bool:
        args = ("r", None, caches, [BLOCKS], event, PER_CHUNK, skip_tokens)
        return self.moved(self.submit_retrieve(*args))

    def moved(self, future: MessagingFuture[bool]) -> bool:
        return future.result(timeout=WAIT_S)


class LockingServer(Server):
    """A lookup locked a context for each load; a commit after its slots releases it."""

    def __init__(self, name: str, memory: mmap.mmap) -> None:
        super().__init__(name, memory)
        self.locks = {"first": 1, "second": 1, "third": 1}
        self.prepared: set[str] = set()
        self.begun, self.go = threading.Event(), threading.Event()
        self.released = threading.Event()

    def prepare_retrieve(self, key: Any, *_: object) -> Any:
        if key == "first":
            self.begun.set()
            assert self.go.wait(WAIT_S)
        self.prepared.add(key)
        return super().prepare_retrieve(key)

    def commit_retrieve(self, key: Any, *_: object) -> Any:
        self.locks[key] -= key in self.prepared
        self.prepared.discard(key)
        if not any(self.locks.values()):
            self.released.set()
        return super().commit_retrieve(key)


def test_a_load_that_is_given_up_leaves_no_lock(server, caches, threaded):
    """Before its turn or in it: its context would stay in memory for half an hour."""
    raw = fill(caches)
    before = raw.clone()
    locking = LockingServer(server.name, server.memory)
    moves = threaded(locking)
    loads = {
        key: moves.submit_retrieve(key, key, caches, [BLOCKS], None, PER_CHUNK)
        for key in locking.locks
    }
    assert locking.begun.wait(WAIT_S)
    for key in ("second", "first", "third"):
        moves.give_up(loads[key])
    assert not any(moves.moved(loads[key]) for key in ("second", "third"))
    moves.cancel_all_but(())  # as after every step
    locking.go.set()
    assert not moves.moved(loads["first"])
    assert locking.released.wait(WAIT_S)
    assert set(locking.locks.values()) == {0}  # and none of another reader's
    assert same_bits(raw, before)


class SlowEngine(ReferenceEngine):
    """Three waits end before the copies do."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def submit(self, *plan: Any, **options: Any) -> Any:
        self._plan, self._options = plan, options
        return 1

    def flush(self, timeout_s: float) -> bool:
        self.waits.append(len(self.waits) == 3)
        if self.waits[-1]:
            super().submit(*self._plan, **self._options)
            assert super().flush(WAIT_S)
        return self.waits[-1]


def test_a_slow_copy_is_told_when_it_is_over(server, caches, threaded, monkeypatch):
    """Its blocks and chunks would be somebody else's while it still writes."""
    engine = SlowEngine()
    engines = CopyEngines(engine, ReferenceEngine())
    monkeypatch.setattr(copier_module, "make_engines", lambda _: engines)
    fill(caches)
    assert threaded().store(caches)
    assert engine.waits == [False, False, False, True]
    assert any(bytes(server.memory))


def test_the_mover_waits_for_the_forward_pass_before_it_locks(server, caches, threaded):
    """Whoever gives a copy up waits for copies only, never for a forward pass."""
    moves = threaded()
    seen: list[bool] = []

    class Event:
        def synchronize(self) -> None:
            threads = (moves.threads.loads, moves.threads.stores)
            seen.append(any(thread._copy_lock.locked() for thread in threads))
            fill(caches)

    assert moves.store(caches, Event())
    stored = bytes(server.memory)
    assert moves.store(caches)
    assert stored == bytes(server.memory)  # as the forward pass left them
    assert moves.load(caches, Event())
    assert seen == [False, False]


def engines_of(cuda: FakeCuda) -> CopyEngines:
    pinned = HostRanges(cuda)
    return CopyEngines(CupyEngine(cuda, pinned), CupyEngine(cuda, pinned), pinned)


def test_lmcaches_memory_is_pinned_while_it_is_there(server, tensors, monkeypatch):
    """By a device that takes copies to and from unpinned memory for faults."""
    cuda = FakeCuda(seed=3)
    monkeypatch.setattr(copier_module, "make_engines", lambda _: engines_of(cuda))
    caches, config = tensors
    pool = fill(caches)
    before, cache = pool.clone(), caches["l1"]
    context = server.context()
    chunks = context._build_slot_tensors(server.slots())
    cuda.take_over(pool.data_ptr(), pool.numel(), "device")
    cuda.take_over(chunks[0].data_ptr(), len(server.memory), "pageable")
    copier = ChunkCopier.of(caches, config, HINTS)
    assert copier.name == "cupy"
    for times in (1, 2):
        copier.attach(context)
        copier.copy(Direction.STORE, BLOCKS, PER_CHUNK, chunks)
        pool.zero_()
        copier.copy(Direction.LOAD, BLOCKS, PER_CHUNK, chunks)
        copier.detach()
        assert cuda.calls.count("pin") == cuda.calls.count("unpin") == times
        with pytest.raises(TransferError, match="never pinned"):
            copier.copy(Direction.STORE, BLOCKS, PER_CHUNK, chunks)
    after = cache[BLOCKS].clone()
    pool.copy_(before)
    assert same_bits(after, cache[BLOCKS])
    assert not cuda.broken
    copier.close()


def test_memory_must_be_shared(tensors):
    copier = ChunkCopier.of(*tensors, HINTS)
    with pytest.raises(TransferError, match="shares no memory"):
        copier.attach(SimpleNamespace())
    copier.close()


def test_a_block_that_lmcache_counts_otherwise_is_refused(tensors, monkeypatch):
    monkeypatch.setattr(copier_module, "_block_bytes", lambda *_: 4096)
    with pytest.raises(TransferError, match="for which LMCache has 4096"):
        ChunkCopier.of(*tensors, HINTS)


class Adapter(SimpleNamespace):
    """What `Registration` reads of LMCache's worker adapter."""

    def __init__(self, groups: int = 1, mode: str | None = None) -> None:
        super().__init__(
            model_name="model",
            lmcache_tokens_per_chunk=256,
            req_client=SimpleNamespace(get_chunk_size=lambda: _answered(256)),
            engine_group_infos=[None] * groups,
            transfer_ctx=None,
            _layout_hints=HINTS,
            _mp_transfer_mode=mode,
            _mq_timeout=1.0,
            registered_by_server=0,
        )

    def _send_register_kv_caches_request(self, kv_caches: Any) -> None:
        self.registered_by_server += 1

    def _ensure_heartbeat_started(self) -> None:
        self.pings = True


@pytest.fixture
def register() -> Iterator[Any]:
    """Makes registrations; their threads end with the test."""
    threads: list[CopyThreads] = []

    def make(adapter: Adapter, config: Any, *, sleeps: bool = False) -> Any:
        extra = {}
        if adapter._mp_transfer_mode is not None:
            extra["lmcache.mp.mp_transfer_mode"] = adapter._mp_transfer_mode
        vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
            model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        )
        threads.append(CopyThreads())
        made = registration.Registration(
            adapter, threads[-1], MetricsBuffer(), vllm_config, config
        )
        made.name_here = registration.own_name(vllm_config, config)
        made.threads = threads[-1]
        return made

    yield make
    for thread in threads:
        thread.close()


def two_groups() -> tuple[Any, Any]:
    groups = [*one_group(FULL), KVCacheGroupSpec(["w0"], FULL)]
    return registered(KVCacheLayout.LBHNC, groups)


@pytest.mark.parametrize("adapter", [Adapter(groups=2), Adapter(mode="lmcache_driven")])
def test_what_a_server_has_mapped_may_not_sleep(adapter, register):
    caches, config = two_groups()
    register(adapter, config, sleeps=True)
    with pytest.raises(ConfigError, match="--enable-sleep-mode"):
        adapter._send_register_kv_caches_request(caches)
    assert adapter.registered_by_server == 0


@pytest.mark.parametrize("mode", [None, "lmcache_driven"])
def test_what_lmcaches_server_moves(tensors, register, mode):
    """Several groups, or because it is asked to."""
    caches, config = tensors if mode else two_groups()
    adapter = Adapter(groups=1 if mode else 2, mode=mode)
    made = register(adapter, config)
    assert made.name_here == ""
    adapter._send_register_kv_caches_request(caches)
    assert adapter.registered_by_server == 1
    assert adapter.pings, "a worker that dies before its first copy is missed"
    assert adapter.model_name == "model"
    assert adapter._mp_transfer_mode == "lmcache_driven"


def test_groups_that_only_lmcache_splits_are_refused(tensors, register):
    """The scheduler's half cannot know of them, and looks up under our name."""
    caches, config = tensors
    adapter = Adapter(groups=2)
    made = register(adapter, config)
    assert adapter.model_name == "model" + made.name_here != "model"
    with pytest.raises(TransferError, match="2 groups"):
        adapter._send_register_kv_caches_request(caches)
    assert adapter.registered_by_server == 0


def test_what_an_old_server_prepared_is_given_up(tensors, register):
    """A restart: no slot of the old server is filled and told to the new one."""
    caches, config = tensors
    adapter = Adapter(groups=2)
    stores = register(adapter, config).threads.stores
    begun, go = threading.Event(), threading.Event()
    wrote, ended = [], queue.SimpleQueue()

    def store(move: Any) -> bool:
        begun.set()
        assert go.wait(WAIT_S)
        with move.copying():
            wrote.append(True)
        return True

    for _ in range(2):
        stores.submit(store, ended.put)
    assert begun.wait(WAIT_S)
    with pytest.raises(TransferError):
        adapter._send_register_kv_caches_request(caches)
    go.set()
    assert [ended.get(timeout=WAIT_S) for _ in range(2)] == [False, False]
    assert wrote == []
