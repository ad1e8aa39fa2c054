"""How does a new request relate to the turns that its program left open?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from ttlcache.programs.model import Program, Turn
from ttlcache.toolcalls.tool_names import is_subagent


class Relation(Enum):
    """Kinds of arrivals."""

    CONTINUES = "continues"  # its prompt extends an open turn
    SUPERSEDES = "supersedes"  # it rewrote history: only a prefix of the turn lives on
    BRANCHES = "branches"  # a sub-agent, a parallel branch, a retry, a first turn


class Continuation(NamedTuple):
    """The relation, the turn it concerns, and the blocks both have in common.

    shared_blocks is None where nobody knows: hashes of unpinned turns are not kept.
    """

    relation: Relation
    turn: Turn | None = None
    shared_blocks: int | None = None


_BRANCH = Continuation(Relation.BRANCHES)


def relate(program: Program, hashes: Sequence[bytes], num_tokens: int) -> Continuation:
    """Match a prompt against the open turns of its program.

    Args:
        program: with `live_requests` not yet counting this request.
        hashes: of the prompt's full blocks.
        num_tokens: length of the prompt.
    """
    extended = [
        turn for turn in program.open_turns if turn.continued_by(hashes, num_tokens)
    ]
    if not extended:
        return _superseded(program, hashes)
    turn = extended[0]
    if len(extended) > 1:
        turn = max(extended, key=lambda t: (t.num_hashes, t.token))
    return Continuation(Relation.CONTINUES, turn, turn.num_hashes)


def _superseded(program: Program, hashes: Sequence[bytes]) -> Continuation:
    # While another request of the program is under way this one is a parallel
    # branch, and after a sub-agent call it is the child: the parent's turn stays.
    if program.live_requests or not program.open_turns:
        return _BRANCH
    turn = program.open_turns[-1]
    if is_subagent(turn.gap_key):
        return _BRANCH
    if not turn.hashes:
        # One turn after the other under one id: the gap is over, whatever changed.
        alone = len(program.open_turns) == 1
        return Continuation(Relation.SUPERSEDES, turn) if alone else _BRANCH
    shared = shared_blocks(turn.hashes, hashes, turn.num_hashes)
    if shared == 0:
        return _BRANCH
    return Continuation(Relation.SUPERSEDES, turn, shared)


def shared_blocks(
    mine: Sequence[bytes], theirs: Sequence[bytes], limit: float = math.inf
) -> int:
    """Number of leading hashes that two chained hash lists have in common.

    Hashes are chained, so equality is monotone and a binary search suffices. Those
    from `limit` on do not count.
    """
    low, high = 0, int(min(len(mine), len(theirs), limit))
    while low < high:
        middle = (low + high + 1) // 2
        if mine[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
