"""What all formats of tool calls share: parser protocol, answer, word tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ttlcache.types import APPROVAL_GAP, FINAL_GAP, GapKey

#: Calls of one turn that are looked at. More say nothing new about the gap.
MAX_CALLS = 64


#: Reads one format of tool calls in output text. It gets at most `chain.SCAN_LIMIT`
#: characters, works in linear time, never raises, and returns the key of each call in
#: order, or () where the text is not in this format. A call whose tool name is
#: half-written is no call; one whose arguments are half-written has the coarse key of
#: its tool.
Parser = Callable[[str], tuple[GapKey, ...]]


def combine(keys: Iterable[GapKey]) -> GapKey | None:
    """The gap key of all calls of one turn; None for no call.

    Waiting for a human outlasts every tool, and a finishing call ends the program
    whatever runs beside it, so these two decide alone.
    """
    calls = tuple(keys)[:MAX_CALLS]
    if not calls:
        return None
    for decisive in (APPROVAL_GAP, FINAL_GAP):
        if decisive in calls:
            return decisive
    return GapKey.parallel(calls)


def words(text: str) -> frozenset[str]:
    """The words of a table."""
    return frozenset(text.split())
