"""Finished turns between their end and their continuation, and their pins.

The one place that opens and closes gaps, and that ends pins in all tables at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ttlcache.clock import Clock
from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory, interned
from ttlcache.estimators.plain_cache import PlainCache
from ttlcache.programs.continuation import Continuation, Relation
from ttlcache.programs.divergence import outline
from ttlcache.programs.model import (
    MAX_AWAITED_TURNS,
    Claim,
    Pin,
    Program,
    RequestRecord,
    Turn,
)
from ttlcache.programs.prompt_fingerprint import PromptFingerprint
from ttlcache.retention.pin_table import PinTable
from ttlcache.telemetry.events import Telemetry
from ttlcache.toolcalls.base import combine
from ttlcache.toolcalls.tool_names import key_for_name
from ttlcache.types import (
    FINAL_GAP,
    UNKNOWN_GAP,
    BlockHolder,
    Finish,
    GapKey,
    Hints,
    PinOutcome,
    ReleaseMode,
)

#: Weight of the newest observation of the share that a program reuses.
REUSE_WEIGHT = 0.5

#: Told a pin that ended, and for which an engine with nothing to run waited.
OnStall = Callable[[Pin], None]
#: Told the program of a pin that ended unclaimed.
OnUnclaimed = Callable[[Program], None]


class Followed(NamedTuple):
    """What a request finds of the turn that it continues.

    pin: alive, with the request as a claimant, or None.
    reusable_tokens: of the turn's context, what its prompt repeats.
    """

    pin: Pin | None = None
    reusable_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class AwaitedTurns:
    """Awaited turns of all programs: gaps, continuations, ends.

    plain: the cache that vLLM would have without pins.
    """

    clock: Clock
    holder: BlockHolder
    block_tokens: int
    pins: PinTable
    gaps: GapHistory
    costs: CostModel
    plain: PlainCache
    telemetry: Telemetry
    on_rekey: Callable[[str], None] | None
    on_stall: OnStall
    on_unclaimed: OnUnclaimed

    def open(self, record: RequestRecord, finish: Finish, now_s: float) -> Turn:
        """A request finished as a turn of its program: its gap begins."""
        turn = _finished_turn(record, finish, self.block_tokens, now_s)
        program = record.program
        if turn.outline:
            program.last_turn = turn
        self.gaps.start(turn.gap_id, turn.gap_key, turn.finish_s)
        if program.awaited_turns:
            program.awaited_turns.append(turn)
        else:  # mostly: a list of one takes less memory than one that has grown
            program.awaited_turns = [turn]
        self.drop_excess(program)
        return turn

    def drop_excess(self, program: Program) -> None:
        """Too many awaited turns: the oldest that no request waits for give way."""
        if len(program.awaited_turns) <= MAX_AWAITED_TURNS:
            return
        idle = [turn for turn in program.awaited_turns if not self._has_claimant(turn)]
        for turn in idle[:-MAX_AWAITED_TURNS]:
            program.awaited_turns.remove(turn)
            self.close(turn, PinOutcome.SUPERSEDED)

    def follow(
        self,
        program: Program,
        continuation: Continuation,
        request_id: str,
        now_s: float,
    ) -> Followed:
        """A request goes on from a turn: close its gap, wait for its pin."""
        turn = continuation.turn
        if turn is None:
            return Followed()
        gap_s = self.gaps.finish(turn.gap_id, now_s)
        if gap_s is not None:
            self.telemetry.gap(turn.gap_key, gap_s)
        if turn.has_expired_pin:
            turn.has_expired_pin = False
            self.telemetry.count_outcome(turn.gap_key, PinOutcome.EXPIRED)
        pin = self.pins.get(turn.pin_id)
        relation, shared = continuation.relation, continuation.shared_blocks
        reusable = turn.context_tokens
        if relation is not Relation.CONTINUES:
            # What was rewritten cannot be hit: losing it is not the engine's fault.
            reusable = 0 if shared is None else shared * self.block_tokens
            pin = self._release_rewritten(pin, reusable)
        program.drops_outputs = relation is Relation.DROPS_OUTPUT
        if relation is not Relation.SUPERSEDES:
            self._learn_share(program, 1.0)
        elif shared is not None:
            self._learn_share(program, shared / turn.num_hashes)
        if pin is None:
            if turn in program.awaited_turns:
                program.awaited_turns.remove(turn)
            return Followed(None, reusable)
        # Open until the pin is claimed: a retry may find it, too.
        pin.continued = True
        self.pins.add_claimant(pin, request_id)
        return Followed(pin, reusable)

    def account_claim(
        self, pin: Pin, record: RequestRecord, cached_tokens: int
    ) -> Claim:
        """A request takes a pin over: what that spares, against plain vLLM's cache.

        The caller ends the pin next.
        """
        claimed = min(cached_tokens, pin.kv_tokens)
        # With several cache groups a token has its KV in more, or larger, blocks.
        tokens_per_block = pin.kv_tokens / pin.kv_blocks
        pool_tokens = self.holder.pressure().pool_blocks * tokens_per_block
        plain_hit = self.plain.hit_tokens(
            record.program.key, pin.turn.finish_s, pool_tokens
        )
        kept = int(min(plain_hit, claimed))
        saved_s = self.costs.prefill_s(claimed, kept)
        self.plain.on_saved(saved_s)
        return Claim(pin.pin_id, claimed, claimed - kept, saved_s)

    def close(self, turn: Turn, outcome: PinOutcome) -> None:
        """No request will continue this turn."""
        self.gaps.abandon(turn.gap_id, self.clock.now_s())
        if turn.has_expired_pin:
            self.telemetry.count_outcome(turn.gap_key, PinOutcome.NO_RETURN)
        pin = self.pins.get(turn.pin_id)
        if pin is not None:
            self.end_pin(pin, outcome)

    def close_all(self, program: Program) -> None:
        """The program ended; a request that waits may still claim its pin."""
        turns, program.awaited_turns = program.awaited_turns, []
        for turn in turns:
            if not self._has_claimant(turn):
                self.close(turn, PinOutcome.ENDED)

    def end_pin(
        self,
        pin: Pin,
        outcome: PinOutcome,
        mode: ReleaseMode = ReleaseMode.KEEP_CACHED,
    ) -> int:
        """End a pin in every table; returns the blocks that became free."""
        now_s = self.clock.now_s()
        self.telemetry.unpin(now_s, pin, outcome)
        self.pins.remove(pin)
        program, turn = pin.program, pin.turn
        if pin.continued and turn in program.awaited_turns:
            program.awaited_turns.remove(turn)
        # Of an awaited turn it is not known yet whether a longer TTL would have helped.
        if outcome is PinOutcome.EXPIRED and turn in program.awaited_turns:
            turn.has_expired_pin = True
        else:
            self.telemetry.count_outcome(turn.gap_key, outcome)
        if pin.stalled_s > 0.0:
            self.on_stall(pin)
        if outcome is not PinOutcome.CLAIMED:
            self.on_unclaimed(program)
        freed = self.holder.release(pin.pin_id, outcome, mode)
        if self.on_rekey is not None:
            for request_id in pin.claimants:
                self.on_rekey(request_id)
        return freed

    def shrink_pin(
        self,
        pin: Pin,
        drop_blocks: int,
        outcome: PinOutcome,
        mode: ReleaseMode = ReleaseMode.KEEP_CACHED,
    ) -> int:
        """Drop about so many blocks from a pin's tail; returns those that became free.

        Args:
            outcome: how the pin ends if that leaves nothing of it.
        """
        shrunk = self.holder.shrink(pin.pin_id, drop_blocks, mode)
        if shrunk is None:
            return self.end_pin(pin, outcome, mode)
        self.pins.shrink(
            pin, kv_blocks=shrunk.kept_blocks, kv_tokens=shrunk.kept_tokens
        )
        self.telemetry.shrink(self.clock.now_s(), pin)
        return shrunk.freed_blocks

    def _has_claimant(self, turn: Turn) -> bool:
        pin = self.pins.get(turn.pin_id)
        return pin is not None and pin.has_claimant

    def _release_rewritten(self, pin: Pin | None, shared_tokens: int) -> Pin | None:
        """Release what a rewritten history cannot reuse."""
        # A pin that covers a prefix only may hold nothing that was rewritten.
        if pin is None or pin.kv_tokens <= shared_tokens:
            return pin
        keep = pin.kv_blocks * shared_tokens // pin.kv_tokens
        self.shrink_pin(pin, pin.kv_blocks - keep, PinOutcome.SUPERSEDED)
        return self.pins.get(pin.pin_id)

    @staticmethod
    def _learn_share(program: Program, share: float) -> None:
        program.reuse_share += REUSE_WEIGHT * (share - program.reuse_share)


def _finished_turn(
    record: RequestRecord, finish: Finish, block_tokens: int, now_s: float
) -> Turn:
    # The KV of the last sampled token does not exist.
    context_tokens = max(1, finish.num_tokens - 1)
    num_hashes = min(len(finish.hashes), context_tokens // block_tokens)
    return Turn(
        record.seq,  # gap_id
        now_s,
        interned(_gap_key(record.hints, finish)),
        context_tokens,
        num_hashes,
        finish.hashes[num_hashes - 1] if num_hashes else b"",
        prompt_fingerprint=PromptFingerprint.of(
            finish.hashes, finish.tokens, record.stable_tokens, block_tokens
        ),
        place=record.place,
        outline=outline(record.head_tokens, finish, num_hashes, block_tokens),
    )


def _gap_key(hints: Hints, finish: Finish) -> GapKey:
    if hints.tools:
        named = _named_gap(hints.tools)
        if named is not None:
            return named
    if finish.read_tool is None:
        return UNKNOWN_GAP
    return finish.read_tool() or FINAL_GAP


@lru_cache(maxsize=4096)
def _named_gap(tools: tuple[str, ...]) -> GapKey | None:
    return combine(key_for_name(name) for name in tools)
