"""A prompt that does not begin with its program's last context: where, and why.

No prefix cache can hit behind the first block that differs. Only programs with an id
of their own are looked at: without one, the prefix is what makes a request a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from ttlcache.programs.continuation import Continuation, Relation, shared_blocks
from ttlcache.programs.model import OUTLINE_LENGTHS, Program, Turn
from ttlcache.types import Arrival, Finish

#: The end of a prompt may differ without the client's doing: the template's generation
#: prompt, and tokens that merge with what follows.
_SLACK_BLOCKS = 2
#: A head to which each turn appends a line grows by no more than this.
_REMINDER_BLOCKS = 3
_MARK_BYTES = 4


class Cause(StrEnum):
    """Where a prompt leaves its program's last context."""

    HEAD = "head"  # in what the conversation's first prompt held already
    MIDDLE = "middle"  # between that and the end of the last prompt
    OUTPUT = "output"  # in what the last turn put out
    SHORTENED = "shortened"  # behind the same head, and shorter: compaction, a rewind

    @property
    def is_early(self) -> bool:
        """Whether most of the context is computed again although it is still there.

        Once alone it proves nothing: a sub-agent's first turn under its parent's id
        looks like it, and a client that drops old tool results once in a while.
        """
        return self in (Cause.HEAD, Cause.MIDDLE)


#: What each means, and what to do about it.
REMEDIES: dict[Cause, str] = {
    Cause.HEAD: (
        "the head of the prompt changes from turn to turn (system text, tools, a "
        "header), or several conversations share one id; for Claude Code set "
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER=off and CLAUDE_CODE_ATTRIBUTION_HEADER=0, "
        "see docs/clients.md"
    ),
    Cause.MIDDLE: (
        "the client, or the model's chat template, rewrites earlier turns, see "
        "docs/clients.md"
    ),
    Cause.OUTPUT: (
        "the last output came back changed (a template that drops reasoning, tool "
        "calls written anew); only its own tokens are computed again"
    ),
    Cause.SHORTENED: "the history was cut or summarised (compaction)",
}


class Divergence(NamedTuple):
    """A prompt against its program's last context, in tokens.

    at_tokens: as many are the same; more, by less than the distance to the next mark,
        where the context's hashes were not kept.
    is_sure: not so for an early one after a turn that had none, see `Cause.is_early`.
    """

    cause: Cause
    at_tokens: int
    context_tokens: int
    is_sure: bool = True

    def __str__(self) -> str:
        return (
            f"prompt diverged at token {self.at_tokens:,} of {self.context_tokens:,} "
            f"from its program's last turn: {REMEDIES[self.cause]}"
        )


def outline(
    head_tokens: int, finish: Finish, num_hashes: int, block_tokens: int
) -> bytes:
    """What is kept of a context whose hashes are not: lengths and a few marks.

    head_tokens: of the conversation's first prompt; 0 makes no outline.
    """
    if not head_tokens or not num_hashes:
        return b""
    hashes = finish.hashes
    places = _places(head_tokens, finish.prompt_tokens, num_hashes, block_tokens)
    marks = [hashes[place - 1][:_MARK_BYTES] for place in places]
    return OUTLINE_LENGTHS.pack(head_tokens, finish.prompt_tokens) + b"".join(marks)


class Comparison(NamedTuple):
    """What a prompt is to the main conversation of its program.

    head_tokens: of its head, for the turn's outline; 0 where it is no turn of it.
    """

    head_tokens: int = 0
    divergence: Divergence | None = None


_ASIDE = Comparison()


def compare(
    program: Program, arrival: Arrival, continuation: Continuation, block_tokens: int
) -> Comparison:
    """Whether a prompt begins with the last context of its program's conversation.

    Remembers in `program.strayed` whether it left it early.

    Args:
        program: one with an id; `live_requests` does not count this request yet.
    """
    hashes, num_tokens = arrival.hashes, arrival.num_tokens
    last = program.last_turn
    if last is None:
        return Comparison(num_tokens)
    head_tokens, _ = last.head_and_prompt_tokens
    shared = _shared_with(last, hashes, block_tokens)
    relation = continuation.relation
    # A sub-agent's next turn extends a turn that is not the conversation's.
    is_aside = relation is Relation.DROPS_OUTPUT and continuation.turn is not last
    continues = relation is Relation.CONTINUES or is_aside
    if shared == last.num_hashes or continues:
        program.strayed = False
        return Comparison(head_tokens) if shared == last.num_hashes else _ASIDE
    if program.live_requests:
        return _ASIDE
    cause = _cause(last, shared, num_tokens, block_tokens)
    if cause is None:
        return _ASIDE
    is_sure = program.strayed or not cause.is_early
    if cause is Cause.HEAD:
        if shared >= head_tokens // block_tokens // 2:
            if last.hashes:
                # Is it about this place the next time, or one that moves on?
                place = shared + _SLACK_BLOCKS + 1 + _REMINDER_BLOCKS
                head_tokens = place * block_tokens
        elif not is_sure:
            head_tokens = num_tokens  # maybe another conversation's first prompt
    program.strayed = cause.is_early
    at_tokens = shared * block_tokens
    found = Divergence(cause, at_tokens, last.context_tokens, is_sure)
    return Comparison(head_tokens, found)


def _shared_with(turn: Turn, hashes: Sequence[bytes], block_tokens: int) -> int:
    """Leading blocks that a prompt shares with a turn's context.

    Without the turn's hashes: up to the last mark before the difference.
    """
    if turn.hashes:
        return shared_blocks(turn.hashes, hashes, turn.num_hashes)
    head, prompt = turn.head_and_prompt_tokens
    shared, start = 0, OUTLINE_LENGTHS.size
    for place in _places(head, prompt, turn.num_hashes, block_tokens):
        mark = turn.outline[start : start + _MARK_BYTES]
        if place > len(hashes) or hashes[place - 1][:_MARK_BYTES] != mark:
            break
        shared, start = place, start + _MARK_BYTES
    return shared


def _cause(turn: Turn, shared: int, num_tokens: int, block_tokens: int) -> Cause | None:
    """Why a prompt has only `shared` blocks of a context.

    None where it rather begins anew (a side request, a sub-agent, another
    conversation) or repeats a part of the context (a retry).
    """
    head, prompt = turn.head_and_prompt_tokens
    if shared >= num_tokens // block_tokens:
        return None
    if num_tokens < prompt:
        return Cause.SHORTENED if shared >= head // block_tokens // 2 > 0 else None
    if shared >= prompt // block_tokens - _SLACK_BLOCKS:
        return Cause.OUTPUT
    in_head = shared < head // block_tokens - _SLACK_BLOCKS
    return Cause.HEAD if in_head else Cause.MIDDLE


def _places(head: int, prompt: int, num_hashes: int, block_tokens: int) -> list[int]:
    """Blocks, counted from 1, whose hashes are marks: the bounds between the causes,
    some between them, and the context's last."""
    head, prompt = head // block_tokens, prompt // block_tokens
    wanted = {
        *(1, head // 8, head // 4, head // 2, head - _SLACK_BLOCKS, head),
        *((head + prompt) // 2, prompt - _SLACK_BLOCKS, num_hashes),
    }
    return sorted([place for place in wanted if 0 < place <= num_hashes])
