"""Programs, recognised by nothing but the chunks that their requests look up.

LMCache hashes a context in chunks, each hash over everything before it: a context is a
chain of hashes, and the next turn of a program is the request whose chain goes on where
an idle program's chain ended.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ttlcache.types import UNKNOWN_GAP, GapKey
from ttlcache_lmcache.retention.residency import Chunk, Residency

#: Seconds after which a request without an end has none: its engine died. Later than
#: LMCache clears its session away under `ttlcache serve-tiers`.
LOST_S = 1860.0


@dataclass(slots=True, eq=False)
class ChainProgram:
    """One program.

    chain: chunks of its latest context, from the start.
    prompt_chunks: how many of them the last turn's prompt had.
    request: the one of it under way.
    seen_s: when it was last heard of; once nothing runs, when that ended.
    since_s: when its last turn ended, maybe before its session did.
    is_told: a client set a TTL for it.
    deadline_s: while nothing runs, until when it is inside that.
    """

    number: int
    chain: list[Chunk]
    prompt_chunks: int
    context_tokens: int
    request: str | None = None
    seen_s: float = 0.0
    since_s: float = 0.0
    deadline_s: float = 0.0
    is_finished: bool = False
    is_told: bool = False
    gap_key: GapKey = UNKNOWN_GAP

    def is_running(self, now_s: float) -> bool:
        return self.request is not None and now_s - self.seen_s < LOST_S

    def is_in_ttl(self, now_s: float) -> bool:
        """Whether it is idle, and inside the TTL that a client set."""
        return self.is_told and now_s < self.deadline_s and not self.is_running(now_s)


_Programs: TypeAlias = dict[Chunk, dict[ChainProgram, None]]


class ProgramTable:
    """All programs and who holds which chunk. Not thread-safe: the caller locks.

    Args:
        max_programs: programs remembered; the longest idle is forgotten.
        residency: is told which chunks are somebody's, and which nobody's.

    Attributes:
        changed: programs that have other chunks, share one with fewer, or may be worth
            more or less, since whoever ranks them took them from here.
        num_chunks: of all programs; one that several share counts for each.
    """

    def __init__(self, max_programs: int, residency: Residency) -> None:
        self._max = max_programs
        self._residency = residency
        self._numbers = itertools.count()
        self._programs: OrderedDict[ChainProgram, None] = OrderedDict()  # by seen_s
        self._by_request: dict[str, ChainProgram] = {}
        self._holders: _Programs = {}
        self._by_end: _Programs = {}
        self.changed: dict[ChainProgram, None] = {}
        self.num_chunks = 0

    def __contains__(self, program: ChainProgram) -> bool:
        return program in self._programs

    def programs(self) -> list[ChainProgram]:
        """The one silent for longest first."""
        return list(self._programs)

    def longest_silent(self) -> ChainProgram | None:
        return next(iter(self._programs), None)

    def holders(self, chunk: Chunk) -> dict[ChainProgram, None]:
        """Its programs, the one that has it for the shortest time last."""
        return self._holders.get(chunk, {})

    def of_request(self, request_id: str) -> ChainProgram | None:
        """The program of a request under way."""
        return self._by_request.get(request_id)

    def begin(
        self, request_id: str, chain: Sequence[Chunk], tokens: int, now_s: float
    ) -> tuple[ChainProgram, bool]:
        """A request looks its prompt up.

        Returns:
            Its program, and whether that goes on with a turn (False: it is new, or
            the request is known already, as after a preemption).
        """
        known = self._by_request.get(request_id)
        if known is not None:
            return known, False
        program = self._continued(chain, tokens, now_s)
        goes_on = program is not None
        if program is None:
            program = self._new()
        self._set_chain(program, list(chain))
        program.prompt_chunks = len(chain)
        program.context_tokens = tokens
        program.is_finished = program.is_told = False
        self.rest(program, now_s)  # of a request without an end
        program.request = request_id
        self._by_request[request_id] = program
        return program, goes_on

    def rest(self, program: ChainProgram, now_s: float) -> None:
        """A turn of it ended; nothing of it runs now."""
        self._no_request(program)
        program.seen_s = now_s
        self._programs[program] = None
        self._programs.move_to_end(program)
        self.changed[program] = None

    def extend(self, chain: Sequence[Chunk]) -> ChainProgram | None:
        """A request's whole context is known now: what it generated counts, too.

        Returns:
            The program whose chain `chain` extends, None if nobody's.
        """
        for depth in range(len(chain), 0, -1):
            ending = self._by_end.get(chain[depth - 1])
            if ending:
                program = next(reversed(ending))
                # What is somebody's as a whole is a hit, and may be a part of his
                # prompt only.
                if depth < len(chain) and chain[-1] not in self._holders:
                    self._set_chain(program, [*program.chain, *chain[depth:]])
                return program
        return None

    def adopt(
        self,
        chain: Sequence[Chunk],
        tokens: int,
        program: ChainProgram | None,
        now_s: float,
    ) -> ChainProgram:
        """A context that no lookup announced is there.

        Args:
            program: whose it is; None: whose chain it extends, or a new program's.
        """
        keeps_place = program in self._programs  # it was heard of before
        if program is None:
            program = self.extend(chain)
        if program is None:
            program = self._new()
        if program.is_running(now_s):
            return program  # its session says at its end what it has
        if (
            len(chain) < len(program.chain)
            and chain[-1] == program.chain[len(chain) - 1]
        ):
            return program  # an older turn's session, that ended later
        self._set_chain(program, list(chain))
        program.prompt_chunks = min(program.prompt_chunks, len(chain))
        program.context_tokens = tokens
        if not keeps_place:
            self.rest(program, now_s)
        return program

    def forget(self, program: ChainProgram) -> None:
        """Nothing is known of it any more; its chunks are nobody's."""
        self._no_request(program)
        self._programs.pop(program, None)
        self._set_chain(program, [])

    def _continued(
        self, chain: Sequence[Chunk], tokens: int, now_s: float
    ) -> ChainProgram | None:
        """The idle program that goes on: behind its context, or behind its prompt.

        Behind the prompt only, where the generated tokens come back in another form
        (stripped reasoning, another tokenisation). A prompt that others start with,
        too, is no sign of this program.
        """
        for depth in range(len(chain), 0, -1):
            chunk = chain[depth - 1]
            found = list(self._by_end.get(chunk, ()))
            holders = self._holders.get(chunk, {})
            if len(holders) == 1 and depth < len(chain):
                found += (each for each in holders if each.prompt_chunks == depth)
            for program in found:
                if tokens >= program.context_tokens and not program.is_running(now_s):
                    return program
        return None

    def _no_request(self, program: ChainProgram) -> None:
        if program.request is not None:
            self._by_request.pop(program.request, None)
            program.request = None

    def _set_chain(self, program: ChainProgram, chain: list[Chunk]) -> None:
        common = 0
        for old, new in zip(program.chain, chain, strict=False):
            if old != new:
                break
            common += 1
        if program.chain:
            _unlist(self._by_end, program.chain[-1], program)
        self._release(program, program.chain[common:])
        self.num_chunks += len(chain) - common
        for chunk in chain[common:]:
            self._holders.setdefault(chunk, {})[program] = None
            self._residency.own(chunk)
        if chain:
            self._by_end.setdefault(chain[-1], {})[program] = None
        program.chain = chain
        self.changed[program] = None

    def _release(self, program: ChainProgram, chunks: Sequence[Chunk]) -> None:
        shared: ChainProgram | None = None
        self.num_chunks -= len(chunks)
        for chunk in chunks:
            _unlist(self._holders, chunk, program)
            shared = next(iter(self.holders(chunk)), shared)
            if chunk not in self._holders:
                self._residency.disown(chunk)
        if shared is not None:  # of the deepest such chunk, so of all before it
            self.changed[shared] = None

    def _new(self) -> ChainProgram:
        while len(self._programs) >= self._max:
            idle = (each for each in self._programs if each.request is None)
            self.forget(next(idle, None) or next(iter(self._programs)))
        return ChainProgram(next(self._numbers), [], 0, 0)


def _unlist(programs: _Programs, chunk: Chunk, program: ChainProgram) -> None:
    del programs[chunk][program]
    if not programs[chunk]:
        del programs[chunk]
