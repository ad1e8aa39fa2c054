"""Connectors with simulated tiers: vLLM's own hooks of an asynchronous load.

`get_num_new_matched_tokens` answers (tokens, True); vLLM allocates the blocks and
parks the request; `update_state_after_alloc` books the link; the simulator reports the
arrival through `KVConnectorOutput.finished_recving`, like a worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ttlcache.clock import default_clock
from ttlcache_connector.connector import TTLConnector
from ttlcache_sim.events import EventQueue
from ttlcache_sim.idle_connector import IdleConnector, register_connectors
from ttlcache_sim.tiers.store import Load, TierStore

PLAIN, WITH_PINS = "SimTierConnector", "SimTierTTLConnector"
_store: TierStore | None = None


class TierClient:
    """What both connectors do with the tiers; times are virtual."""

    def __init__(self, store: TierStore, block_tokens: int) -> None:
        self.store = store
        self._block_tokens = block_tokens
        self._clock = default_clock()
        self._wanted: dict[str, tuple[int, int]] = {}
        self._loads: dict[str, Load] = {}
        self._arrivals: EventQueue[str] = EventQueue()

    def match(self, request: Any, num_computed: int) -> tuple[int, bool]:
        """Full blocks beyond the local hit; never the whole prompt."""
        readable = self.store.readable(program_of(request), self._clock.now_s())
        stop = min(readable, request.num_tokens - 1)
        stop -= stop % self._block_tokens
        if stop <= num_computed:
            self._wanted.pop(request.request_id, None)
            return 0, False
        self._wanted[request.request_id] = (num_computed, stop)
        return stop - num_computed, True

    def start(self, request: Any) -> Load:
        """The blocks are there: load what was matched last."""
        start, stop = self._wanted.pop(request.request_id)
        load = self.store.load(program_of(request), start, stop, self._clock.now_s())
        self._loads[request.request_id] = load
        self._arrivals.push(load.arrives_s, request.request_id)
        return load

    def finished_load(self, request_id: str) -> Load | None:
        """The load of a request, once, when it goes on after it."""
        return self._loads.pop(request_id, None)

    def store_context(self, request: Any) -> None:
        """A turn finished: write it through, or forget an ended program."""
        hints = (request.kv_transfer_params or {}).get("ttlcache", {})
        if hints.get("is_last_step"):
            self.store.drop(program_of(request))
            return
        # The KV of the last sampled token does not exist.
        tokens = request.num_tokens - 1
        tokens -= tokens % self._block_tokens
        self.store.write(program_of(request), tokens, self._clock.now_s())

    # --- for the simulator's loop -------------------------------------------------

    def next_s(self) -> float | None:
        return self._arrivals.next_s()

    def take_arrived(self, now_s: float) -> set[str]:
        arrived = set()
        while (due := self._arrivals.pop_due(now_s)) is not None:
            arrived.add(due[1])
        return arrived


def program_of(request: Any) -> str:
    """Id of the program of a simulated request, "program/turn"."""
    return str(request.request_id).rpartition("/")[0]


class _Tiered:
    """Hooks of both; `tiers` is shared with the simulator's loop."""

    tiers: TierClient

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        assert _store is not None, "construct inside use_tiers()"
        self.tiers = TierClient(_store, vllm_config.cache_config.block_size)

    @property
    def requires_kv_delivery(self) -> bool:
        return False


class SimTierTTLConnector(_Tiered, TTLConnector):
    """TTLConnector above simulated tiers."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self.scheduler_role is not None:
            self.scheduler_role.requests.on_tier_lookup(request)
        return self.tiers.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self.tiers.start(request)
            return
        load = self.tiers.finished_load(request.request_id)
        if load is not None:
            self._learn(request, load)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # First: the policy asks which tier holds the turn.
        self.tiers.store_context(request)
        return super().request_finished_all_groups(request, block_ids)

    def _learn(self, request: Any, load: Load) -> None:
        if self.scheduler_role is None:
            return
        controller = self.scheduler_role.parts.controller
        seconds = load.arrives_s - load.asked_s
        controller.costs.observe_reload(load.tier, load.tokens, seconds)
        record = controller.requests.get(request.request_id)
        if record is not None:
            record.reloaded_tokens += load.tokens


class SimTierConnector(_Tiered, IdleConnector):
    """Tiers alone, under vLLM's own scheduler: what LMCache does for vLLM."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.tiers.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self.tiers.start(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.tiers.store_context(request)
        return super().request_finished_all_groups(request, block_ids)


@contextmanager
def use_tiers(store: TierStore | None) -> Iterator[None]:
    """Connectors constructed inside use `store`: vLLM constructs them, not we."""
    global _store
    previous, _store = _store, store
    try:
        yield
    finally:
        _store = previous


def current_store() -> TierStore | None:
    """The store of the innermost `use_tiers`."""
    return _store


def register() -> None:
    """Make both names known to vLLM; idempotent."""
    classes = {PLAIN: SimTierConnector, WITH_PINS: SimTierTTLConnector}
    register_connectors(__name__, classes)
