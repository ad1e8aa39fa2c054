"""A finished request as a turn of its program: what runs next, what can be reused."""

from __future__ import annotations

from functools import lru_cache

from ttlcache.estimators.gap_history import interned
from ttlcache.programs.divergence import outline
from ttlcache.programs.model import RequestRecord, Turn
from ttlcache.toolcalls import combine, key_for_tool
from ttlcache.types import FINAL_GAP, Finish, GapKey, Hints

#: Gap key of a turn whose output nobody could read.
UNKNOWN_GAP = GapKey("unknown")


def finished_turn(
    record: RequestRecord, finish: Finish, block_tokens: int, now_s: float
) -> Turn:
    # The KV of the last sampled token does not exist.
    context_tokens = max(1, finish.num_tokens - 1)
    num_hashes = min(len(finish.hashes), context_tokens // block_tokens)
    return Turn(
        record.seq,  # the token of its gap
        now_s,
        interned(_gap_key(record.hints, finish)),
        context_tokens,
        num_hashes,
        finish.hashes[num_hashes - 1] if num_hashes else b"",
        place=record.place,
        outline=outline(record.head_tokens, finish, num_hashes, block_tokens),
    )


def _gap_key(hints: Hints, finish: Finish) -> GapKey:
    if hints.tools:
        named = _named_gap(hints.tools)
        if named is not None:
            return named
    if finish.detect is None:
        return UNKNOWN_GAP
    return finish.detect() or FINAL_GAP


@lru_cache(maxsize=4096)
def _named_gap(tools: tuple[str, ...]) -> GapKey | None:
    return combine(key_for_tool(name) for name in tools)
