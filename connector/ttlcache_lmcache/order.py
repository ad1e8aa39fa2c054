"""In which order chunks leave L1, and which must leave ahead of what will be written.

The order of programs is a `Ranking` of ranks.py. Of one program the tail goes before
the prefix, and what programs share goes with the last of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ttlcache_lmcache.programs import ChainProgram, Chunk, ProgramBook
from ttlcache_lmcache.ranks import Rank, Ranking, of_stray
from ttlcache_lmcache.residency import Residency

#: What is worth least first: its rank, whose it is, its chunks.
Queue = list[tuple[Rank, ChainProgram | None, Sequence[Chunk]]]


def queue(
    book: ProgramBook, residency: Residency, rank: Ranking, now_s: float
) -> Queue:
    """All programs, and the chunks in L1 that are nobody's."""
    found: Queue = [
        (rank(program, now_s), program, program.chain) for program in book.programs()
    ]
    for chunk, used_s in residency.chunks():
        if not book.is_held(chunk):
            found.append((of_stray(used_s, now_s), None, [chunk]))
    found.sort(key=lambda entry: entry[0])
    return found


def leaving(
    entries: Queue, book: ProgramBook
) -> Iterator[tuple[Rank, ChainProgram | None, Chunk]]:
    """Every chunk once, in the order in which they should go."""
    passed: Counter[Chunk] = Counter()
    for rank, program, chain in entries:
        for chunk in reversed(tuple(chain)):
            passed[chunk] += 1
            if passed[chunk] >= book.num_holders(chunk):
                yield rank, program, chunk


def chunks_to_come(book: ProgramBook, residency: Residency) -> int:
    """Chunks of requests under way that L1 lacks: they will be written."""
    return sum(
        not residency.has(chunk)
        for program in book.under_way()
        for chunk in program.chain
    )


def chunks_without_place(
    entries: Queue, residency: Residency, places: int
) -> list[Chunk]:
    """Chunks of L1 that have to go if it holds `places`, the first to go first.

    Places are given from the most worth down, also to what requests under way are
    about to write: a program makes room for those that go before it, never for one
    that is worth less.
    """
    placed: set[Chunk] = set()
    homeless: list[list[Chunk]] = []
    for _, program, chain in reversed(entries):
        is_running = program is not None and bool(program.running)
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
