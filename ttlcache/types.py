"""Plain data that crosses module borders. No behaviour beyond small helpers.

What is made anew for every turn is a named tuple: immutable like a frozen dataclass,
which costs three times as much to make.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

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
    second: str = ""


class GapKey(_Parts):
    """What runs in the gap after a turn; the key of a gap history.

    For shell agents the tool alone ("bash") predicts nothing, so a key has up to
    three parts, from coarse to fine: tool, executable, second word.
    """

    __slots__ = ()

    def __new__(cls, tool: str, executable: str = "", second: str = "") -> GapKey:
        return tuple.__new__(
            cls,
            (
                tool[:KEY_PART_LIMIT],
                executable[:KEY_PART_LIMIT],
                second[:KEY_PART_LIMIT],
            ),
        )

    def backoff(self) -> tuple[GapKey, ...]:
        """This key and its coarser versions, finest first (global not included)."""
        keys = []
        if self.second:
            keys.append(self)
        if self.executable:
            keys.append(GapKey(self.tool, self.executable))
        keys.append(GapKey(self.tool))
        return tuple(keys)

    @staticmethod
    def parallel(keys: tuple[GapKey, ...]) -> GapKey:
        """The key of several calls made in one turn: the gap is the slowest one."""
        if len(keys) == 1:
            return keys[0]
        tools = "+".join(sorted({key.executable or key.tool for key in keys}))
        return GapKey(PARALLEL_TOOL, tools)

    def __str__(self) -> str:
        return " ".join(p for p in (self.tool, self.executable, self.second) if p)


USER_GAP = GapKey(USER_TOOL)
FINAL_GAP = GapKey(FINAL_TOOL)
APPROVAL_GAP = GapKey(APPROVAL_TOOL)


class PinOutcome(StrEnum):
    """How a pin ended. Every pin ends exactly once, with exactly one of these."""

    CLAIMED = "claimed"  # the next turn arrived and took over the blocks
    EXPIRED = "expired"  # the deadline passed with nobody waiting for it
    VICTIM = "victim"  # released under memory pressure
    SUPERSEDED = "superseded"  # the program went on without this turn's tail
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
    firm_s: for how much of `ttl_s` the policy itself stands; the rest is a client's
        wish, which anybody's waiting request overrules. Policies leave it alone.
    patience_s: for so long after the turn's end an engine that has nothing to run
        rather waits for the next turn than take the pin. 0: it gives way at once.
    whole_below: under pressure the pin gives way block by block, tail first, while it
        keeps this share of its blocks, and then as a whole. 0: to the last block;
        1: always as a whole.
    while_free: it stands while nobody waits for memory: once somebody does, the policy
        is asked again.
    """

    ttl_s: float
    reason: str
    inputs: Mapping[str, float] = NO_INPUTS
    firm_s: float = math.inf
    patience_s: float = 0.0
    whole_below: float = 0.0
    while_free: bool = False


class Pressure(NamedTuple):
    """Memory and queue as the engine saw them at its last step."""

    pool_blocks: int = 0  # usable KV blocks of the pool
    free_blocks: int = 0  # blocks nobody references
    pinned_blocks: int = 0  # blocks referenced by pins, each counted once
    num_running: int = 0
    num_waiting: int = 0
    waiting_blocks: int = 0  # blocks that the head of the queue still lacks
