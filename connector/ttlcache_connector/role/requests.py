"""Events of requests, from vLLM to the core's controller and to the lower tier."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ttlcache.clock import stopwatch_s
from ttlcache.errors import nearest
from ttlcache.programs.hints import HINT_KEYS, parse_hints
from ttlcache.types import UNKNOWN_GAP, Arrival, Finish, Finished, GapKey, Hints
from ttlcache_connector.engine.request_view import (
    drop_unfit_args,
    is_completed,
    is_loading,
    token_slice,
)
from ttlcache_connector.faults import guarded
from ttlcache_connector.log import logger
from ttlcache_connector.role.teardown import turn_off
from ttlcache_connector.tiers.base import turn_end

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from ttlcache.programs.divergence import Cause
    from ttlcache.programs.model import RequestRecord
    from ttlcache_connector.engine.tool_reader import OutputReader
    from ttlcache_connector.role.parts import Parts

log = logger(__name__)

#: A finished turn that takes longer than this in our hooks is slow; so many in a row
#: turn retention off. A policy may be third-party code, and the engine waits for it.
SLOW_FINISH_S = 0.5
MAX_SLOW_IN_A_ROW = 3
#: Unknown keys of hints that are logged by name: clients may make up any number.
MAX_LOGGED_KEYS = 20


class RequestEvents:
    """Arrival, lookup, allocation and end; no method raises."""

    def __init__(self, parts: Parts, reader: OutputReader | None) -> None:
        self._parts, self._reader = parts, reader
        self._controller, self._holder = parts.controller, parts.holder
        self._lower, self._above_tier = parts.lower, parts.above_tier
        self._engine, self._prefills = parts.engine, parts.prefills
        self.faults = parts.faults
        self._local_hits: dict[str, int] = {}
        self._slow_in_a_row = 0
        self._logged_causes: set[Cause] = set()
        self._logged_keys: set[str] = set()

    @guarded()
    def on_arrival(self, request: Request) -> None:
        """Idempotent: our scheduler calls it before queueing, vLLM after."""
        is_known = request.request_id in self._controller.requests
        if is_known and not request.resumable:
            return
        dropped = drop_unfit_args(request)
        if is_known:  # more input of a streaming session
            return
        for reason in dropped:
            self._parts.count("hints_rejected", reason)
        params = request.sampling_params
        hints = parse_hints(
            request.kv_transfer_params, params.extra_args if params else None
        )
        self._log_unknown_keys(hints)
        record = self._controller.on_arrival(
            Arrival(
                request_id=request.request_id,
                num_tokens=request.num_tokens,
                hashes=request.block_hashes,
                tokens=token_slice(request),
                hints=hints,
                tenant=request.cache_salt or "",
                session_id=request.session_id,
                user_priority=self._engine.user_priority(request),
                reads_cache=not request.skip_reading_prefix_cache,
            )
        )
        self._log_divergence(record)
        lower = self._lower
        if lower.is_up():
            has_pin = record.pin_id is not None
            lower.call(lower.tier.on_arrival, None, request, has_pin=has_pin)

    def match(self, request: Request, hit_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load beyond those found in GPU memory; None means ask again."""
        self.note_local_hit(request, hit_tokens)
        if not self._lower.is_configured:
            return 0, False
        if self._lower.is_up() and self.is_loaded_by_another(request, hit_tokens):
            return None, False  # it hits GPU memory soon, and takes no blocks for it
        found = self._lower.match(
            request, hit_tokens, self.lookup_limit_tokens(request)
        )
        if found.is_answered:
            self.on_tier_lookup(request)
        return found.tokens, bool(found.tokens)

    @guarded(fallback=False)
    def is_loaded_by_another(self, request: Request, hit_tokens: int) -> bool:
        """Whether a load under way begins with, or has, the first block it lacks.

        Its blocks can be hit once it has ended. With several cache groups that may
        give no longer hit: then each loads for itself.
        """
        if not self._holder.is_divisible:
            return False
        index = hit_tokens // self._holder.pool.hash_block_size
        lacking = request.block_hashes[index : index + 1]
        return bool(lacking) and any(
            is_loading(other)
            and other is not request
            and other.block_hashes[index : index + 1] == lacking
            for other in self._prefills
        )

    @guarded()
    def note_local_hit(self, request: Request, hit_tokens: int) -> None:
        self._local_hits[request.request_id] = hit_tokens

    @guarded(fallback=math.inf)
    def lookup_limit_tokens(self, request: Request) -> float:
        """Upper bound on the request's tokens that the tier can hold.

        If the request continues a pinned turn, this engine has computed nothing beyond
        that turn, so a tier need not look further. Without a live pin: infinity.
        """
        record = self._controller.requests.get(request.request_id)
        pin_id = None if record is None else record.pin_id
        pin = None if pin_id is None else self._controller.pins.get(pin_id)
        if pin is None or not pin.turn.num_hashes:
            return math.inf
        return pin.turn.num_hashes * self._holder.pool.hash_block_size

    @guarded()
    def on_tier_lookup(self, request: Request) -> None:
        """The lower tier was asked; vLLM uses no answer for some requests."""
        if not request.skip_reading_prefix_cache:
            chunk_tokens = self._lower.tier.chunk_tokens
            self._controller.tier_knowledge.on_lookup(request.request_id, chunk_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, external_tokens: int
    ) -> None:
        """The request holds its blocks, and of `external_tokens` KV will be loaded."""
        self._lower.update_state_after_alloc(request, blocks, external_tokens)
        self.on_allocated(request, loads=external_tokens > 0)

    @guarded()
    def on_allocated(self, request: Request, *, loads: bool) -> None:
        """Claim its pin."""
        request_id = request.request_id
        hit_tokens = self._local_hits.pop(request_id, 0)
        self._engine.forget(request_id)
        self._prefills.start(request)
        if self._holder.states is not None:
            self._holder.states.track(request)
        record = self._controller.requests.get(request_id)
        self._controller.on_allocated(request_id, hit_tokens, loads=loads)
        if self._above_tier is not None and record is not None:
            self._above_tier.unpinned.on_program_resumed(record.program)

    @guarded()
    def on_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """A request ends, its blocks still referenced: pin them or not."""
        try:
            self._finish(request, block_ids)
        finally:  # also where that raised: no program waits for this request
            if self._holder.states is not None:
                self._holder.states.release(request.request_id)
            self._controller.forget(request.request_id)

    def _finish(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        started_s = stopwatch_s()
        controller, holder = self._controller, self._holder
        self._local_hits.pop(request.request_id, None)
        self._prefills.end(request.request_id)
        self._engine.forget(request.request_id)
        if request.num_output_tokens:
            controller.on_prefilled(request.request_id)
        record = controller.requests.get(request.request_id)
        completed = is_completed(request, self._reader)
        kept_ids = block_ids if completed else tuple([] for _ in block_ids)
        if completed and holder.states is not None:
            prefix = holder.states.cached_prefix(request)
            kept_ids = tuple([block.block_id for block in group] for group in prefix)
        lower, candidate = self._lower, holder.candidate(kept_ids)
        finished = controller.on_finished(
            Finish(
                request_id=request.request_id,
                completed=completed,
                num_tokens=request.num_tokens,
                prompt_tokens=request.num_prompt_tokens,
                hashes=request.block_hashes,
                tokens=token_slice(request),
                kv_blocks=len(candidate.blocks),
                kv_tokens=candidate.kv_tokens,
                count_unpinned=candidate.count_unpinned,
                count_pins=candidate.count_pins,
                divisible=holder.is_divisible,
                read_tool=self._tool_reader(request),
            )
        )
        order = finished.order
        if order is not None:
            holder.hold(order.pin_id, candidate.blocks[: order.kv_blocks])
        # The tier must know the blocks before any is demoted or dropped.
        lower.call(lower.tier.demotions.on_finished, None, request, kept_ids)
        self._hand_to_tier(request, record, candidate.blocks, finished)
        if completed and record is not None and self._above_tier is not None:
            lower.report_turn(turn_end(request.request_id, record, finished.decision))
        self._watch_slow_turns(stopwatch_s() - started_s)

    def _hand_to_tier(
        self,
        request: Request,
        record: RequestRecord | None,
        blocks: list[KVCacheBlock],
        finished: Finished,
    ) -> None:
        """Above a tier: pinned, or kept for a copy, or not to be continued: dropped."""
        above_tier, request_id = self._above_tier, request.request_id
        if above_tier is None:
            return
        if record is None:
            self._lower.tier.demotions.drop(request_id)
        elif finished.order is not None:
            above_tier.on_pinned(finished.order.pin_id, request_id, record.program)
        elif finished.decision is not None:
            above_tier.on_finished_unpinned(request_id, record.program, blocks)
        else:
            self._lower.tier.demotions.drop(request_id)

    def _log_unknown_keys(self, hints: Hints) -> None:
        """Each name once: it is mostly a misspelt one."""
        for key in hints.unknown_keys:
            if key in self._logged_keys or len(self._logged_keys) >= MAX_LOGGED_KEYS:
                continue
            self._logged_keys.add(key)
            near = nearest(key, HINT_KEYS)
            valid = f"valid: {', '.join(HINT_KEYS)}"
            log.warning(
                "ttlcache: a client sends the hint %r, which does not exist; %s "
                "(logged once; ttlcache_hints_rejected_total counts)",
                *(key, f"did you mean {near!r}?" if near else valid),
            )

    def _log_divergence(self, record: RequestRecord) -> None:
        """Each cause once by which contexts are computed again."""
        found = record.divergence
        if found is None or not (found.is_sure and found.cause.is_early):
            return
        if found.cause not in self._logged_causes:
            self._logged_causes.add(found.cause)
            log.warning(
                "ttlcache: %s. No prefix cache can hit behind that token (logged once; "
                "ttlcache_turns_diverged_total counts, ttlcache explain shows each)",
                found,
            )

    def _watch_slow_turns(self, took_s: float) -> None:
        """One slow decision may be the machine's fault; several in a row are ours.

        took_s: what a turn just took, while the engine waited.
        """
        self._controller.telemetry.metrics.observe("decide_seconds", took_s)
        if not self._controller.retention_enabled:
            return
        self._slow_in_a_row = self._slow_in_a_row + 1 if took_s > SLOW_FINISH_S else 0
        if self._slow_in_a_row >= MAX_SLOW_IN_A_ROW:
            self._slow_in_a_row = 0
            self._parts.count("hook_errors", "slow")
            slow = f"{MAX_SLOW_IN_A_ROW} turns' ends in a row took {SLOW_FINISH_S:g} s"
            log.warning("ttlcache: %s or more: retention is off from now on", slow)
            turn_off(self._controller, self._holder)

    def _tool_reader(self, request: Request) -> Callable[[], GapKey | None] | None:
        reader = self._reader
        if reader is None or not reader.ready or not self._controller.retention_enabled:
            return None
        return lambda: self.read_tool(request)

    @guarded(fallback=UNKNOWN_GAP)
    def read_tool(self, request: Request) -> GapKey | None:
        """The tool that the output calls, None for none."""
        return self._reader.read(request.output_token_ids) if self._reader else None
