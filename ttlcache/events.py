"""What an engine adapter tells the controller, and what it must do for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from ttlcache.hints import Hints
from ttlcache.prefixes import TokenSlice
from ttlcache.types import GapKey, Pressure


class Arrival(NamedTuple):
    """A request as it enters the engine.

    tenant: isolation domain (the cache salt); ids are labels inside it.
    hashes: prefix-cache hashes of the prompt's full blocks, root first.
    tokens: slice of the prompt's token ids.
    """

    request_id: str
    num_tokens: int
    hashes: Sequence[bytes]
    tokens: TokenSlice
    hints: Hints
    tenant: str = ""
    session_id: str | None = None
    user_priority: int = 0


class Finish(NamedTuple):
    """A request as it leaves the engine, its blocks still referenced.

    completed: False for aborts and errors: nothing is pinned then.
    hashes: as in `Arrival`; a pinned turn keeps this very list, so it may grow later,
        but not change what it holds.
    kv_blocks, kv_tokens: full, cached blocks that could be pinned, their tokens.
    count_unpinned: how many of the first n of them no pin references right now;
        None means all.
    divisible: whether a prefix of the blocks is worth pinning without the rest.
    footprint_blocks: memory of the request with shared blocks divided among their
        users.
    detect: reads the tool from the output; called only if no hint names it.
    """

    request_id: str
    completed: bool
    num_tokens: int
    prompt_tokens: int
    hashes: Sequence[bytes]
    tokens: TokenSlice
    kv_blocks: int = 0
    kv_tokens: int = 0
    count_unpinned: Callable[[int], int] | None = None
    footprint_blocks: float = 0.0
    divisible: bool = True
    detect: Callable[[], GapKey | None] | None = None


class HoldOrder(NamedTuple):
    """Reference the first `kv_blocks` blocks of the finished turn for `pin_id`."""

    pin_id: int
    kv_blocks: int


class Shrunk(NamedTuple):
    """What a holder did: blocks that became free, and what is still held."""

    freed_blocks: int
    kept_blocks: int
    kept_tokens: int


class BlockHolder(Protocol):
    """The adapter's side of a pin: references on the engine's KV blocks."""

    def claim(self, pin_id: int, behind_blocks: int) -> float:
        """A request that has its blocks claims a pin, which it releases next.

        Args:
            behind_blocks: that plain vLLM would have taken before this request's, for
                prefills which pins spared (`ttlcache.backlog`).

        Returns:
            Tokens of the turn, from its beginning, that plain vLLM's prefix cache
            would still have; `math.inf` for all.
        """
        ...

    def release(self, pin_id: int) -> int:
        """Drop all references of a pin; returns how many blocks became free."""
        ...

    def shrink(self, pin_id: int, drop_blocks: int) -> Shrunk:
        """Drop about `drop_blocks` references from the tail, maybe all of them."""
        ...

    def is_freeable(self, pin_id: int) -> bool:
        """Whether releasing pins can free a block of this one: nobody else uses it."""
        ...

    def count_freeable(self, pin_ids: Iterable[int], enough: int) -> int:
        """How many blocks would be free without these pins; counts to `enough`."""
        ...

    def pressure(self) -> Pressure:
        """Pool and queue right now."""
        ...


class Urgency(Enum):
    """For whom memory is wanted; decides which pins may be taken."""

    OVERDUE = "overdue"  # queued beyond the bound: any pin, if that makes it fit
    WAITING = "waiting"  # a queued request while others run: younger programs' pins
    RUNNING = "running"  # decode or prefill under way: any pin
    STALLED = "stalled"  # nothing runs: everything, whatever it takes


class Admission(Enum):
    """Whether a waiting request may take memory now."""

    ADMIT = "admit"
    WAIT = "wait"
