"""In which order chunks leave L1: what is least worth first.

Finished programs, then what belongs to no program and is no longer used, then expired
ones by deadline, then what no program is known for yet; last, programs inside their
TTL or with a request under way, the longest idle first. That one is the least likely
to return soon, as tools that have run for long go on for long. (The victim order of
the paper's §5.2, the latest program first, was measured and dropped: for GPU memory it
ends thrashing, here it keeps what nobody told is finished.) Of one program the tail
goes before the prefix, and what programs share goes with the last of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ttlcache_lmcache.programs import ChainProgram, Chunk, ProgramBook
from ttlcache_lmcache.residency import Residency

#: A chunk of no program is given this long to be claimed by one: what a request
#: generates is known to be its program's only when the request ends.
GRACE_S = 30.0

_FINISHED, _STRAY, _EXPIRED, _FRESH_STRAY, _KEPT = range(5)


def _program_rank(program: ChainProgram, now_s: float) -> tuple[int, float]:
    if program.running or (not program.is_finished and program.deadline_s > now_s):
        return (_KEPT, program.seen_s)
    if program.is_finished:
        return (_FINISHED, program.seen_s)
    return (_EXPIRED, program.deadline_s)


def is_protected(program: ChainProgram, now_s: float) -> bool:
    """Whether something runs of it or it is inside its TTL."""
    return _program_rank(program, now_s)[0] >= _KEPT


def chunks_to_evict(
    book: ProgramBook, residency: Residency, now_s: float
) -> Iterator[Chunk]:
    """Every chunk of L1 once, in the order in which they should go."""
    queue: list[tuple[tuple[int, float], list[Chunk]]] = [
        (_program_rank(program, now_s), program.chain) for program in book.programs()
    ]
    for chunk, used_s in residency.chunks():
        if not book.is_held(chunk):
            kind = _FRESH_STRAY if now_s - used_s < GRACE_S else _STRAY
            queue.append(((kind, used_s), [chunk]))
    queue.sort(key=lambda entry: entry[0])
    passed: Counter[Chunk] = Counter()
    for _, chain in queue:
        for chunk in reversed(chain):
            passed[chunk] += 1
            if passed[chunk] >= book.num_holders(chunk):
                yield chunk
