"""Turns whose time is over and whose memory is not needed yet.

They stay cached, as prefix cache hits, and are demoted when room gets short: most
of what returns late returns before that, and is never copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ttlcache.programs.model import Program

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

#: No more of the pool than this is kept free of lingering turns.
MAX_ROOM_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class Turn:
    """A finished turn, or what its pin has no room for.

    first: how many of the turn's blocks stand before these, pinned.
    free_blocks: its blocks that were used by nothing else when it came. Later users of
        some of them (another program with the same prompt) are not subtracted.
    """

    request_id: str
    program: Program
    blocks: list[KVCacheBlock]
    free_blocks: int
    first: int = 0


class Lingering:
    """The turns, oldest first."""

    def __init__(self) -> None:
        self._turns: dict[str, Turn] = {}
        self._of: dict[int, dict[str, Turn]] = {}  # by program
        self.blocks = 0
        #: Of these, what would be free without them.
        self.free_blocks = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns.values())

    def add(self, turn: Turn) -> None:
        assert turn.request_id not in self._turns
        self._turns[turn.request_id] = turn
        self._of.setdefault(id(turn.program), {})[turn.request_id] = turn
        self.blocks += len(turn.blocks)
        self.free_blocks += turn.free_blocks

    def pop(self, request_id: str) -> list[KVCacheBlock]:
        """The turn goes; its blocks, none if it was not here."""
        turn = self._turns.pop(request_id, None)
        if turn is None:
            return []
        own = self._of[id(turn.program)]
        del own[request_id]
        if not own:
            del self._of[id(turn.program)]
        self.blocks -= len(turn.blocks)
        self.free_blocks -= turn.free_blocks
        return turn.blocks

    def pop_tail(self, request_id: str, cut: int) -> list[KVCacheBlock]:
        """The turn keeps its first `cut` blocks, and its place; the others."""
        if not cut:
            return self.pop(request_id)
        turn = self._turns[request_id]
        head, tail = turn.blocks[:cut], turn.blocks[cut:]
        # What others use, a common prompt, stands at the beginning.
        free_blocks = max(0, turn.free_blocks - len(tail))
        kept = replace(turn, blocks=head, free_blocks=free_blocks)
        self._turns[request_id] = self._of[id(turn.program)][request_id] = kept
        self.blocks -= len(tail)
        self.free_blocks -= turn.free_blocks - free_blocks
        return tail

    def pop_rest(self, request_id: str) -> list[KVCacheBlock]:
        """The same, of what the turn's pin has no room for."""
        turn = self._turns.get(request_id)
        return self.pop(request_id) if turn is not None and turn.first else []

    def in_order(self) -> Iterator[Turn]:
        """Oldest first, those of programs whose next turn waits after all others."""
        turns = list(self._turns.values())
        yield from (turn for turn in turns if not turn.program.live_requests)
        yield from (turn for turn in turns if turn.program.live_requests)

    def of(self, program: Program) -> list[Turn]:
        return list(self._of.get(id(program), {}).values())


def room_blocks(
    pool_blocks: int, step_tokens: int, group_block_tokens: Sequence[int]
) -> int:
    """Blocks to keep free of lingering turns: what one step may allocate at most.

    step_tokens: vLLM's `max_num_batched_tokens`.
    """
    step_blocks = sum(-(-step_tokens // size) for size in group_block_tokens)
    return min(step_blocks, int(pool_blocks * MAX_ROOM_SHARE))
