"""What ttlcache uses of LMCache 0.5.6 that LMCache keeps private: all of it is here.

Imports neither LMCache nor vLLM; callers pass LMCache's objects. Methods that ttlcache
replaces, each of them once, so that no order of replacements matters:

- scheduler's adapter: `cleanup_lookup_result`, `end_session` (public, by
  `OrphanedLookups`);
- scheduler's connector: `_get_or_create_request_tracker` (by `SaltGenerations`),
  `_report_block_allocation_deltas` (by `set_reports`);
- worker's adapter: `_send_register_kv_caches_request` (by `Registration`);
- server's transfer module: `_release_entry` (by `on_worker_gone`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

# --- the scheduler's connector and adapter ------------------------------------------


class DeferredStores:
    """LMCache's manager of deferred stores, to which there is no public way in."""

    def __init__(self, connector: Any) -> None:
        self._manager = connector._lazy_offload_manager

    def use(self, policy: Any) -> None:
        """After the block pool was bound. LMCache has no registry of policies."""
        self._manager._policy = policy

    def drain(self, output: Any, pool: Any) -> Any:
        """Stores to begin and sessions to end, in a step that LMCache leaves out."""
        return self._manager._drain(output, pool)

    def is_finished(self, request_id: str) -> bool:
        """Not a running request under an id that a client uses again."""
        return bool(self._manager._requests.is_finished(request_id))

    def references(self) -> dict[int, int]:
        """References held for stores under way, per block id."""
        slots = self._manager._requests._slots.values()
        batches = (slot.in_flight for slot in slots if slot.in_flight is not None)
        return dict(Counter(i for batch in batches for i in batch.block_ids))


def replace_tracker_factory(
    connector: Any, factory: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Requests' trackers are made by `factory`; returns LMCache's own."""
    own: Callable[[Any], Any] = connector._get_or_create_request_tracker
    connector._get_or_create_request_tracker = factory
    return own


def hit_alignment_tokens(connector: Any) -> int:
    """Hits of vLLM are rounded down to a multiple of this."""
    return int(connector._hit_alignment_tokens)


def set_answer_timeout(connector: Any, seconds: float) -> None:
    """For how long one answer of a server is waited for, by the adapter of any role."""
    for name in ("scheduler_adapter", "worker_adapter"):
        if hasattr(connector, name):
            getattr(connector, name)._mq_timeout = seconds


def set_reports(connector: Any) -> None:
    """Failed loads by request: running requests may share their blocks. And no block
    allocations, for which each step would copy all tokens of the requests in it."""
    connector._report_request_errors = True
    connector._report_block_allocation_deltas = lambda _: None


def forget_load(connector: Any, request_id: str, chunk_tokens: int) -> None:
    """A load that was to begin does not, and nothing stays locked for it: LMCache
    passes over a request that is `READY` and comes again with nothing computed."""
    tracker = connector.request_trackers.get(request_id)
    if tracker is None:
        return
    if tracker.state.name != "PREFETCHING":
        connector.scheduler_adapter.free_lookup_locks(
            tracker.get_token_ids(),
            tracker.num_vllm_hit_tokens // chunk_tokens * chunk_tokens,
            tracker.num_lmcache_hit_tokens,
            request_id,
            tracker.cache_salt,
            tracker.request_configs,
        )
    tracker.state = type(tracker.state).READY


def open_lookups(adapter: Any) -> Collection[str]:
    """Requests with a lookup, answered or not, that nobody has cleaned up."""
    lookups: Collection[str] = adapter._pending_lookups
    return lookups


def ask_anew(adapter: Any, request_id: str) -> None:
    """What a lookup waits for may never come: its server is asked once it is back."""
    adapter._unacked_lookups.pop(request_id, None)
    adapter._lookup_status.pop(request_id, None)


# --- the worker's adapter ------------------------------------------------------------


def replace_registration(
    adapter: Any, register: Callable[[Any], None]
) -> Callable[[Any], None]:
    """KV tensors are registered by `register`; returns LMCache's own way."""
    own: Callable[[Any], None] = adapter._send_register_kv_caches_request
    adapter._send_register_kv_caches_request = register
    return own


def ping_from_now_on(adapter: Any) -> None:
    """LMCache's worker would begin with its first copy. Before that the server cannot
    tell one that died from one that idles, and keeps its memory mapped."""
    adapter._ensure_heartbeat_started()


def register_anew(adapter: Any) -> None:
    """LMCache's heartbeat does so when the server answers it next."""
    adapter._health_event.clear()


def layout_hints(adapter: Any) -> Any:
    return adapter._layout_hints


def answer_timeout_s(adapter: Any) -> float:
    return float(adapter._mq_timeout)


def register_at_server(
    adapter: Any, register: Callable[[Any], None], kv_caches: Any, timeout_s: float
) -> None:
    """Let LMCache's server map these tensors and move their bytes.

    Args:
        register: LMCache's own way, see `replace_registration`.
    """
    if adapter._mp_transfer_mode is None:
        # The other mode knows one KV cache group only.
        adapter._mp_transfer_mode = "lmcache_driven"
    before_s, adapter._mq_timeout = adapter._mq_timeout, timeout_s
    try:
        register(kv_caches)
    finally:
        adapter._mq_timeout = before_s


def fail_load(adapter: Any, request_id: str) -> None:
    """Reported as LMCache reports a load that it does not even try."""
    adapter._failed_request_ids.add(request_id)
    adapter._dropped_retrieves.add(request_id)


def fail_store(adapter: Any, request_id: str) -> None:
    adapter._completed_store_requests[request_id] = 1
    adapter._failed_store_requests.add(request_id)


def shared_memory(context: Any) -> tuple[int, int, bool]:
    """Address and bytes of the server's memory as mapped here; whether it is pinned."""
    first = context._make_tensor_view(0, 1, [1], "uint8")
    return first.data_ptr(), context._pool_size, context._pinned


# --- the server ----------------------------------------------------------------------


def hands_out_slots(module: Any) -> bool:
    """Whether it is the transfer module that `on_worker_gone` is for."""
    needed = ("_release_entry", "_pending_shm_writes", "_pending_shm_lock")
    return all(hasattr(module, name) for name in needed)


def on_worker_gone(module: Any, call: Callable[[int], None]) -> None:
    """`call` gets a worker's id before LMCache commits for one that is gone."""
    release = module._release_entry

    def released(instance_id: int, entry: Any) -> None:
        call(instance_id)
        release(instance_id, entry)

    module._release_entry = released


def drop_open_stores(module: Any, instance_id: int) -> int:
    """LMCache finds none of the worker's open stores afterwards; how many there were.

    Their room stays reserved until the write TTL: a worker that was only thought dead
    may still write there, and nobody else's chunk must lie there then.
    """
    pending = module._pending_shm_writes
    with module._pending_shm_lock:
        torn = [key for key in pending if key[0] == instance_id]
        for key in torn:
            del pending[key]
    return len(torn)


def num_write_managers(storage_manager: Any) -> int:
    """Among how many L1s the server divides what is stored."""
    return len(storage_manager._write_managers)


def asks_a_policy(controller: Any) -> bool:
    """Whether it is a controller that `replace_eviction_policy` is for."""
    return hasattr(controller, "_eviction_policy")


def replace_eviction_policy(storage_manager: Any, policy: Any) -> Callable[[], None]:
    """The L1 eviction controllers ask this policy, until what is returned is called.

    Their own goes on hearing of L1.
    """
    own = [(c, c._eviction_policy) for c in storage_manager._eviction_controllers]
    for controller, _ in own:
        controller._eviction_policy = policy

    def give_back() -> None:
        for controller, policy in own:
            controller._eviction_policy = policy

    return give_back
