"""Plain data that crosses module borders, and what an engine adapter implements.

No behaviour beyond small helpers.

What is made anew for every turn is a named tuple: immutable like a frozen dataclass,
which costs three times as much to make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol

#: Reserved tool names: gaps that are no tool call have their own history.
USER_TOOL = "__user__"
FINAL_TOOL = "__final__"
APPROVAL_TOOL = "__human_approval__"
PARALLEL_TOOL = "__parallel__"
#: Bound on every part of a gap key: clients and models write these strings.
KEY_PART_LIMIT = 64


class _Parts(NamedTuple):
    tool: str
    executable: str = ""


class GapKey(_Parts):
    """What runs in the gap after a turn; the key of a gap history.

    For shell agents the tool alone ("bash") predicts nothing: theirs has the program
    that runs as well.
    """

    __slots__ = ()

    def __new__(cls, tool: str, executable: str = "") -> GapKey:
        return tuple.__new__(cls, (tool[:KEY_PART_LIMIT], executable[:KEY_PART_LIMIT]))

    def backoff(self) -> tuple[GapKey, ...]:
        """This key and its coarser version (global not included)."""
        return (self, GapKey(self.tool)) if self.executable else (self,)

    @staticmethod
    def parallel(keys: tuple[GapKey, ...]) -> GapKey:
        """The key of several calls made in one turn: the gap is the slowest one."""
        if len(keys) == 1:
            return keys[0]
        tools = "+".join(sorted({key.executable or key.tool for key in keys}))
        return GapKey(PARALLEL_TOOL, tools)

    def __str__(self) -> str:
        return " ".join(filter(None, self))


USER_GAP = GapKey(USER_TOOL)
FINAL_GAP = GapKey(FINAL_TOOL)
APPROVAL_GAP = GapKey(APPROVAL_TOOL)
#: Gap key of a turn whose output nobody could read.
UNKNOWN_GAP = GapKey("unknown")


class PinOutcome(StrEnum):
    """How a pin ended, as counted: every pin once.

    One that passed its deadline ends as EXPIRED, and is counted when its next turn
    comes; if none does, as NO_RETURN.
    """

    CLAIMED = "claimed"  # the next turn arrived and took over the blocks
    EXPIRED = "expired"  # its time was over, or was made so, before the next turn came
    NO_RETURN = "no_return"  # the deadline passed, and no next turn ever came
    VICTIM = "victim"  # gave its memory up: to a request, or to the cap on pins
    SUPERSEDED = "superseded"  # the program went on without it, or has too many
    ENDED = "ended"  # the program ended
    RESET = "reset"  # prefix cache reset, sleep, shutdown or self-disable


class IdentityRule(StrEnum):
    """Which rule told the program of a request."""

    HINT = "hint"
    SESSION = "session"
    PREFIX = "prefix"
    NEW = "new"


class TurnFacts(NamedTuple):
    """What a policy may know about the turn that just finished."""

    program_id: str
    turn_index: int  # turns of the program that have finished, this one included
    gap_key: GapKey
    context_tokens: int  # prompt + output tokens whose KV exists
    kv_blocks: int  # KV blocks that a pin would hold
    requested_ttl_s: float | None = None  # client's wish
    tool_eta_s: float | None = None  # client's estimate of the gap
    waited_s: float = 0.0  # seconds of the gap already over (re-decision)


#: No numbers: the inputs of a decision that needed none.
NO_INPUTS: Mapping[str, float] = MappingProxyType({})


class Decision(NamedTuple):
    """A policy's answer.

    ttl_s: seconds to hold, 0 for "release now", `math.inf` allowed (caps apply).
    reason: one short machine-readable phrase, e.g. "ecdf:tool".
    inputs: the numbers it was computed from.
    policy_ttl_s: the part of `ttl_s` that the policy itself asked for; beyond it the
        pin lasts for the client's own TTL, and waiting requests may take it. Set by
        `Retention`, not by policies.
    stall_wait_s: for so long after the turn's end an engine that has nothing to run
        waits for the next turn rather than take the pin. 0: it takes the pin at once.
    min_keep_share: under pressure the pin loses block by block, tail first, while it
        keeps this share of its blocks, and then goes as a whole. 0: to the last block;
        1: always as a whole.
    uncontended: decided while no request waited for memory; once one does, the policy
        is asked again.
    yields_to_waiting: any request of its tenant that waits for memory may take the pin,
        as long as its next turn has not come.
    """

    ttl_s: float
    reason: str
    inputs: Mapping[str, float] = NO_INPUTS
    policy_ttl_s: float = math.inf
    stall_wait_s: float = 0.0
    min_keep_share: float = 0.0
    uncontended: bool = False
    yields_to_waiting: bool = False


class Pressure(NamedTuple):
    """Memory and queue right now."""

    pool_blocks: int = 0  # usable KV blocks of the pool
    free_blocks: int = 0  # free, or held only by cached turns without a pin
    pinned_blocks: int = 0  # blocks referenced by pins, each counted once
    num_running: int = 0
    num_waiting: int = 0
    memory_is_short: bool = False  # a waiting request lacks some


#: Where a program stands in the queue's order, without what belongs to one request
#: alone; of one length per ordering.
Rank = tuple[int, ...]
#: Returns prompt tokens [start, stop).
TokenSlice = Callable[[int, int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Hints:
    """Validated hints of one request.

    rejected: reasons of bad values; then no hint is used, and nothing is retained.
    unknown_keys: names of no hint, cut to a bounded length; they are left out.
    """

    program_id: str | None = None
    parent_id: str | None = None
    is_last_step: bool = False
    tools: tuple[str, ...] = ()
    tool_eta_s: float | None = None
    ttl_s: float | None = None
    priority_class: int | None = None
    rejected: tuple[str, ...] = ()
    unknown_keys: tuple[str, ...] = ()


NO_HINTS = Hints()


# --- what an engine adapter says and does ---


class Arrival(NamedTuple):
    """A request as it enters the engine.

    tenant: isolation domain (the cache salt); ids are labels inside it.
    hashes: prefix-cache hashes of the prompt's full blocks, root first.
    tokens: slice of the prompt's token ids.
    reads_cache: False where all of the prompt is computed anew, whatever is cached.
    """

    request_id: str
    num_tokens: int
    hashes: Sequence[bytes]
    tokens: TokenSlice
    hints: Hints
    tenant: str = ""
    session_id: str | None = None
    user_priority: int = 0
    reads_cache: bool = True


class Finish(NamedTuple):
    """A request as it leaves the engine, its blocks still referenced.

    completed: False for aborts and errors: nothing is pinned then.
    hashes: as in `Arrival`; a pinned turn keeps this very list, so it may grow later,
        but not change what it holds.
    kv_blocks, kv_tokens: full, cached blocks that could be pinned, their tokens.
    count_unpinned: how many of the first n of them no pin references right now;
        None means all.
    count_pins: how many pins reference the n-th of them; None means none.
    divisible: whether a prefix of the blocks is worth pinning without the rest.
    read_tool: reads the tool from the output; called only if no hint names it.
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
    count_pins: Callable[[int], int] | None = None
    divisible: bool = True
    read_tool: Callable[[], GapKey | None] | None = None


class PinOrder(NamedTuple):
    """Reference the first `kv_blocks` blocks of the finished turn for `pin_id`."""

    pin_id: int
    kv_blocks: int


class Finished(NamedTuple):
    """What becomes of a request that left the engine.

    decision: what the policy said of the turn, None where it was not asked: nobody
        continues such a turn, or nothing is retained.
    order: references that the adapter must take at once, before the engine frees the
        request's blocks; None for none.
    """

    decision: Decision | None = None
    order: PinOrder | None = None


class ReleaseMode(Enum):
    """What becomes of the blocks that a pin gives up.

    KEEP_CACHED: no memory is needed now. They become evictable prefix cache; above a
        lower tier they stay referenced until its `demote` has them copied.
    COPY_FIRST: a waiting request needs memory: they are copied to the lower tier, and
        count as free although they are only soon.
    FREE_NOW: memory is needed in this step.
    """

    KEEP_CACHED = "keep cached"
    COPY_FIRST = "copy first"
    FREE_NOW = "free now"


class Shrunk(NamedTuple):
    """What a holder did: blocks that became free, with `COPY_FIRST` also those that
    will soon, and what is still referenced."""

    freed_blocks: int
    kept_blocks: int
    kept_tokens: int


class BlockHolder(Protocol):
    """The adapter's side of a pin: references on the engine's KV blocks."""

    def release(self, pin_id: int, outcome: PinOutcome, mode: ReleaseMode) -> int:
        """Drop all references of a pin.

        Args:
            outcome: how the pin ended.

        Returns:
            Blocks that became free, with `COPY_FIRST` also those that will soon.
        """
        ...

    def shrink(self, pin_id: int, drop_blocks: int, mode: ReleaseMode) -> Shrunk | None:
        """Drop about `drop_blocks` references from the tail.

        None: nothing would be left of it, and nothing was done; `release` follows.
        """
        ...

    def is_freeable(self, pin_id: int) -> bool:
        """Whether its last block is free once the pins that end with it are shrunk."""
        ...

    def count_freeable(self, pin_ids: Iterable[int], enough: int) -> int:
        """How many blocks would be free without these pins; counts to `enough`."""
        ...

    def pressure(self) -> Pressure:
        """Pool and queue right now."""
        ...


class Urgency(Enum):
    """For whom memory is wanted; decides which pins may be taken."""

    # Holds memory, is overdue, or the queue is in no order of programs: any pin but
    # its own, if that makes it fit.
    WAITING_ANY_PIN = "waiting-any-pin"
    WAITING = "waiting"  # a queued request while others run: see `Reclaimer`
    HELD_BACK = "held-back"  # admission said no: pins that have no right to stay
    RUNNING = "running"  # decode or prefill under way: any pin
    STALLED = "stalled"  # nothing runs: any pin, once its policy waits no longer


class Admission(Enum):
    """Whether a waiting request may take memory now."""

    ADMIT = "admit"
    WAIT = "wait"
