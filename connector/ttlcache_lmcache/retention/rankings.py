"""What a program's place in L1 is worth.

What a client said comes first: finished programs go before all others, those past a
TTL that a client set go next, those inside it last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ttlcache_lmcache.retention.program_table import ChainProgram
from ttlcache_lmcache.retention.return_estimator import ReturnEstimator

#: What is less goes first: the kind, the worth within it, and what settles ties.
Rank: TypeAlias = tuple[int, float, float]
Ranking: TypeAlias = Callable[[ChainProgram, float], Rank]

#: A chunk of no program is given this long to be claimed by one: what a request
#: generates is known to be its program's only when the request ends.
GRACE_S = 30.0

_FINISHED, _UNOWNED, _EXPIRED, _FRESH_UNOWNED, _KEPT, _TOLD = range(6)


def is_protected(program: ChainProgram, now_s: float) -> bool:
    """Whether something runs of it or it is inside a client's TTL."""
    if program.running:
        return True
    return program.is_told and not program.is_finished and program.deadline_s > now_s


def _said(program: ChainProgram, now_s: float) -> int:
    """The kind that a client's word gives; `_KEPT` where nobody said anything."""
    if program.running:
        return _KEPT
    if program.is_finished:
        return _FINISHED
    if program.is_told:
        return _TOLD if is_protected(program, now_s) else _EXPIRED
    return _KEPT


def by_return(returns: ReturnEstimator) -> Ranking:
    """What is wanted again soonest goes last; of equals the oldest program."""

    def rank(program: ChainProgram, now_s: float) -> Rank:
        kind = _said(program, now_s)
        worth = program.seen_s if kind < _KEPT else returns.worth(program, now_s)
        return (kind, worth, -float(program.number))

    return rank


def of_unowned(used_s: float, now_s: float) -> Rank:
    """A chunk in L1 that is no known program's."""
    fresh = now_s - used_s < GRACE_S
    return (_FRESH_UNOWNED if fresh else _UNOWNED, used_s, 0.0)
