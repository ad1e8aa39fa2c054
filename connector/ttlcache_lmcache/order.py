"""In which order chunks leave L1, and which must leave now.

First to go: finished programs, then what belongs to no program and is no longer used,
then expired ones by deadline, then what no program is known for yet; last, programs
inside their TTL or with a request under way, the latest program first (the victim
order of the paper's §5.2). Where contexts take turns and do not all fit, an order by
last use gives every one of them up just before it is wanted; by seniority some stay
whole. Of one program the tail goes before the prefix, and what programs share goes
with the last of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ttlcache_lmcache.programs import ChainProgram, Chunk, ProgramBook
from ttlcache_lmcache.residency import Residency

#: A chunk of no program is given this long to be claimed by one: what a request
#: generates is known to be its program's only when the request ends.
GRACE_S = 30.0

_FINISHED, _STRAY, _EXPIRED, _FRESH_STRAY, _KEPT = range(5)
#: What is worth least first: its rank, whether something runs of it, its chunks.
_Queue = list[tuple[tuple[int, float], bool, Sequence[Chunk]]]


def _program_rank(program: ChainProgram, now_s: float) -> tuple[int, float]:
    if program.running or (not program.is_finished and program.deadline_s > now_s):
        return (_KEPT, -float(program.number))
    if program.is_finished:
        return (_FINISHED, program.seen_s)
    return (_EXPIRED, program.deadline_s)


def is_protected(program: ChainProgram, now_s: float) -> bool:
    """Whether something runs of it or it is inside its TTL."""
    return _program_rank(program, now_s)[0] >= _KEPT


def _queue(book: ProgramBook, residency: Residency, now_s: float) -> _Queue:
    queue: _Queue = [
        (_program_rank(program, now_s), bool(program.running), program.chain)
        for program in book.programs()
    ]
    for chunk, used_s in residency.chunks():
        if not book.is_held(chunk):
            kind = _FRESH_STRAY if now_s - used_s < GRACE_S else _STRAY
            queue.append(((kind, used_s), False, [chunk]))
    queue.sort(key=lambda entry: entry[0])
    return queue


def chunks_to_evict(
    book: ProgramBook, residency: Residency, now_s: float
) -> Iterator[Chunk]:
    """Every chunk of L1 once, in the order in which they should go."""
    passed: Counter[Chunk] = Counter()
    for _, _, chain in _queue(book, residency, now_s):
        for chunk in reversed(chain):
            passed[chunk] += 1
            if passed[chunk] >= book.num_holders(chunk):
                yield chunk


def chunks_to_come(book: ProgramBook, residency: Residency) -> int:
    """Chunks of requests under way that L1 lacks: they will be written."""
    return sum(
        not residency.has(chunk)
        for program in book.under_way()
        for chunk in program.chain
    )


def chunks_without_place(
    book: ProgramBook, residency: Residency, places: int, now_s: float
) -> list[Chunk]:
    """Chunks of L1 that have to go if it holds `places`, the first to go first.

    Places are given from the most worth down, also to what requests under way are
    about to write: a program makes room for those that go before it, never for one
    that is worth less.
    """
    placed: set[Chunk] = set()
    homeless: list[list[Chunk]] = []
    for _, is_running, chain in reversed(_queue(book, residency, now_s)):
        without = []
        for chunk in chain:
            if chunk in placed or not (is_running or residency.has(chunk)):
                continue
            placed.add(chunk)
            if places > 0:
                places -= 1
            elif residency.has(chunk):
                without.append(chunk)
        homeless.append(without)
    return [chunk for without in reversed(homeless) for chunk in reversed(without)]
