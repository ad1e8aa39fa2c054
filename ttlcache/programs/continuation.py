"""How does a new request relate to the turns that its program left open?"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from ttlcache.programs.model import Program, Turn
from ttlcache.toolcalls.tool_names import is_subagent
from ttlcache.types import Arrival

#: A prompt that has less than this of the head of the conversation is a side request:
#: templates begin all prompts with the same preamble. Where the prompt before it left
#: the conversation, too, and it is no shorter, the client changes the head each time.
ASIDE_HEAD_SHARE = 1 / 8


class Relation(Enum):
    """Kinds of arrivals."""

    CONTINUES = "continues"  # its prompt extends an awaited turn
    DROPS_OUTPUT = "drops output"  # it extends the turn's prompt, not what came of it
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


def relate(program: Program, arrival: Arrival, block_tokens: int) -> Continuation:
    """Match a prompt against the awaited turns of its program.

    Args:
        program: with `live_requests` not yet counting this request.
        block_tokens: tokens per prefix-cache hash.
    """
    hashes, turns = arrival.hashes, program.awaited_turns
    extended = [t for t in turns if t.continued_by(hashes, arrival.num_tokens)]
    if extended:
        turn = max(extended, key=lambda t: (t.num_hashes, bool(t.pin_id), t.gap_id))
        return Continuation(Relation.CONTINUES, turn, turn.num_hashes)
    return _without_output(program, arrival, block_tokens) or _superseded(
        program, arrival, block_tokens
    )


def _without_output(
    program: Program, arrival: Arrival, block_tokens: int
) -> Continuation | None:
    """A client, or its chat template, sends less than the model put out: no reasoning.

    As with rewritten histories, beside another request of the program it may be a
    parallel branch, and after a sub-agent call the child.
    """
    if program.live_requests:
        return None
    found = [
        (turn.prompt_fingerprint.num_hashes, turn.gap_id, turn)
        for turn in program.awaited_turns
        if turn.prompt_fingerprint is not None
        and not is_subagent(turn.gap_key)
        and turn.prompt_fingerprint.is_extended_by(arrival, block_tokens)
    ]
    if not found:
        return None
    num_hashes, _, turn = max(found)
    shared = shared_blocks(turn.hashes, arrival.hashes, turn.num_hashes)
    return Continuation(Relation.DROPS_OUTPUT, turn, max(shared, num_hashes))


def _superseded(program: Program, arrival: Arrival, block_tokens: int) -> Continuation:
    # While another request of the program is under way this one is a parallel
    # branch, and after a sub-agent call it is the child: the parent's turn stays.
    if program.live_requests or not program.awaited_turns:
        return _BRANCH
    turn = program.awaited_turns[-1]
    if is_subagent(turn.gap_key):
        return _BRANCH
    if not turn.hashes:
        # One turn after the other under one id: the gap is over, whatever changed.
        alone = len(program.awaited_turns) == 1
        return Continuation(Relation.SUPERSEDES, turn) if alone else _BRANCH
    shared = shared_blocks(turn.hashes, arrival.hashes, turn.num_hashes)
    head_tokens, prompt_tokens = turn.head_and_prompt_tokens
    changes_head = program.strayed and arrival.num_tokens >= prompt_tokens
    share = ASIDE_HEAD_SHARE * head_tokens // block_tokens
    is_aside = shared < share and not changes_head
    if shared == 0 or is_aside:
        return _BRANCH
    return Continuation(Relation.SUPERSEDES, turn, shared)


def shared_blocks(mine: Sequence[bytes], theirs: Sequence[bytes], limit: int) -> int:
    """Number of the first `limit` hashes that two chained hash lists have in common.

    Hashes are chained, so equality is monotone and a binary search suffices.
    """
    most = min(len(mine), len(theirs), limit)
    return bisect_left(range(most), True, key=lambda at: mine[at] != theirs[at])
