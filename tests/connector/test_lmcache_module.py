"""Our module inside LMCache's server, on LMCache's own memory and transfer."""

from __future__ import annotations

import uuid
from types import SimpleNamespace

import pytest
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.multiprocess.custom_types import (
    IPCCacheServerKey,
    RegisterEngineDrivenContextPayload,
)
from lmcache.v1.multiprocess.engine_context import MPCacheServerContext
from lmcache.v1.multiprocess.modules.engine_driven_transfer import (
    EngineDrivenTransferModule,
)

from ttlcache_connector.lmcache_server.module import build_server_modules

CHUNK = 16
WORKER = 7


class Server:
    def __init__(self) -> None:
        name = f"lmcache_l1_pool_test_{uuid.uuid4().hex[:8]}"
        memory = L1MemoryManagerConfig(1 << 20, use_lazy=False, shm_name=name)
        config = StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=memory),
            eviction_config=EvictionConfig(eviction_policy="LRU"),
        )
        self.context = MPCacheServerContext(config, chunk_size=CHUNK)
        self.transfer = EngineDrivenTransferModule(self.context)
        modules = (self.transfer,)
        self.ours = build_server_modules(
            SimpleNamespace(server_context=self.context, modules=modules, config={})
        )
        worker = RegisterEngineDrivenContextPayload(
            instance_id=WORKER,
            model_name="model",
            world_size=1,
            block_size=CHUNK,
            num_layers=2,
            hidden_dim_size=8,
            dtype_str="float32",
            use_mla=False,
            num_physical_slots=CHUNK,
        )
        self.transfer.register_kv_cache_engine_driven_context(worker)

    def prepare(self, request_id: str) -> IPCCacheServerKey:
        """A worker gets slots for two chunks."""
        first = ord(request_id) * 1000
        tokens = tuple(range(first, first + 2 * CHUNK))
        key = IPCCacheServerKey("model", 1, 0, tokens, 0, len(tokens), request_id)
        answer = self.transfer.prepare_store(key, WORKER)
        assert len(answer.context["slots"]) == 2
        return key

    def readable(self, key: IPCCacheServerKey) -> int:
        """Chunks that a lookup would find."""
        keys = self.context.resolve_obj_keys(key, [0])[0]
        (manager,) = self.context.storage_manager._l1_managers_by_id.values()
        found = manager.reserve_read(keys)
        good = [k for k, (error, _) in found.items() if error.name == "SUCCESS"]
        manager.finish_read(good)
        return len(good)


@pytest.mark.parametrize("dies", [False, True])
def test_what_a_worker_never_wrote_is_nobodys_hit(dies):
    """A worker that leaves or dies between the slots and its commit."""
    server = Server()
    transfer = server.transfer
    whole, torn = server.prepare("a"), server.prepare("b")
    assert transfer.commit_store(whole, WORKER, b"")
    assert (server.readable(whole), server.readable(torn)) == (2, 0)
    if dies:
        transfer._engine_driven_contexts[WORKER].last_seen = float("-inf")
        assert transfer.reap_stale_instances(1.0, 1.0) == [WORKER]
    else:
        transfer.unregister_kv_cache(WORKER)
    assert (server.readable(whole), server.readable(torn)) == (2, 0)
    server.context.close()
