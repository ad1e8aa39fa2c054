"""Our mover as the lower tier uses it: CUDA tensors, LMCache's pinned shared memory."""

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_blocks_go_to_lmcaches_memory_and_come_back(
    runtime, server, torch_device, layout, monkeypatch
):
    import torch
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from tests.connector import test_kv_layouts as cases
    from tests.connector import test_lower_copiers as lower
    from ttlcache_connector.copy.engines import make_engines
    from ttlcache_connector.tiers.lmcache import copier as copier_module

    caches, config = cases.registered(
        KVCacheLayout[layout], cases.one_group(cases.FULL), device=torch_device
    )
    if torch_device.type == "cpu":
        pool = next(iter(caches.values())).untyped_storage()
        runtime.pin(pool.data_ptr(), pool.nbytes())
        cuda = make_engines(torch.device("cuda", 0))
        monkeypatch.setattr(copier_module, "make_engines", lambda _: cuda)
    hints = {"kv_layout": "NHD" if layout == "LBNHC" else "HND"}
    copier = copier_module.ChunkCopier.of(caches, config, hints)
    assert copier.name == "cupy"
    moves = lower.Threaded(server, copier, caches)
    blocks = [3, 1, 2, 9, 8, 4, 7, 6]
    for cache in caches.values():
        cache.view(torch.int16).random_(-30_000, 30_000)
    wanted = {name: cache[blocks].cpu() for name, cache in caches.items()}
    event = moves.create_recorded_event()  # after the writes above, in stream order
    store = moves.submit_store("r", None, caches, [blocks], event, lower.PER_CHUNK)
    assert moves.moved(store)
    for cache in caches.values():
        cache.zero_()
    event = moves.create_recorded_event()
    load = moves.submit_retrieve("r", None, caches, [blocks], event, lower.PER_CHUNK)
    assert moves.moved(load)
    for name, cache in caches.items():
        assert lower.same_bits(cache[blocks].cpu(), wanted[name])
    moves.threads.close()
    moves.close()
    if torch_device.type == "cpu":
        runtime.unpin(pool.data_ptr())


@pytest.fixture
def server(torch_device):
    pytest.importorskip("lmcache")
    pytest.importorskip("vllm")
    from tests.connector.test_lower_copiers import shared_memory_server

    with shared_memory_server() as answering:
        yield answering
