"""Programs, recognised by nothing but the chunks that their requests look up.

LMCache hashes a context in chunks, each hash over everything before it: a context is a
chain of hashes, and the next turn of a program is the request whose chain goes on where
an idle program's chain ended.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ttlcache.types import UNKNOWN_GAP, GapKey

#: (space, chunk hash), see `residency.space_of`. The hash alone would mix models, and
#: what clients and resets keep apart by a salt.
Chunk: TypeAlias = tuple[str, bytes]


@dataclass(slots=True, eq=False)
class ChainProgram:
    """One program.

    chain: chunks of its latest context, from the start.
    prompt_chunks: how many of them the last turn's prompt had.
    running: requests of it under way.
    seen_s: when it was last heard of; once nothing runs, when that ended.
    since_s: when its last turn ended, maybe before its session did.
    is_told: a client set a TTL for it.
    deadline_s: while nothing runs, until when it is inside that.
    refused_from: the first chunk of its chain that L1 refused in this turn.
    """

    number: int
    chain: list[Chunk]
    prompt_chunks: int
    context_tokens: int
    running: set[str] = field(default_factory=set)
    seen_s: float = 0.0
    since_s: float = 0.0
    deadline_s: float = 0.0
    is_finished: bool = False
    is_told: bool = False
    refused_from: int | None = None
    gap_key: GapKey = UNKNOWN_GAP


class Watcher(Protocol):
    """Is told what changes about programs and about chunks in L1."""

    def held(self, chunk: Chunk) -> None:
        """The chunk is a program's now."""

    def freed(self, chunk: Chunk) -> None:
        """The chunk is nobody's any more."""

    def changed(self, program: ChainProgram) -> None:
        """It has other chunks, or maybe another rank, or shares one with fewer."""

    def forgot(self, program: ChainProgram) -> None:
        """It is nobody now."""

    def entered(self, chunk: Chunk, used_s: float) -> None:
        """L1 has something of the chunk now."""

    def used(self, chunk: Chunk, now_s: float) -> None:
        """A chunk in L1 was used."""

    def left(self, chunk: Chunk) -> None:
        """L1 has nothing of the chunk any more."""


class ProgramTable:
    """All programs and who holds which chunk. Not thread-safe: the caller locks.

    Args:
        max_programs: programs remembered; the longest idle is forgotten.
    """

    def __init__(self, max_programs: int, watcher: Watcher) -> None:
        self._max = max_programs
        self._numbers = itertools.count()
        self._programs: OrderedDict[ChainProgram, None] = OrderedDict()  # by seen_s
        self._by_request: dict[str, ChainProgram] = {}
        self._holders: dict[Chunk, dict[ChainProgram, None]] = {}
        self._by_end: dict[Chunk, dict[ChainProgram, None]] = {}
        self._watcher = watcher

    def __len__(self) -> int:
        return len(self._programs)

    def programs(self) -> list[ChainProgram]:
        """The one silent for longest first."""
        return list(self._programs)

    def changed(self, program: ChainProgram) -> None:
        """What is known of it changed: it may be worth more or less."""
        self._watcher.changed(program)

    def longest_silent(self) -> ChainProgram | None:
        return next(iter(self._programs), None)

    def holders(self, chunk: Chunk) -> Collection[ChainProgram]:
        return self._holders.get(chunk, {}).keys()

    def last_holder(self, chunk: Chunk) -> ChainProgram | None:
        """The one of its programs that has it for the shortest time."""
        holders = self._holders.get(chunk)
        return next(reversed(holders)) if holders else None

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
        program = self._continued(chain, tokens)
        goes_on = program is not None
        if program is None:
            self._make_room()
            program = ChainProgram(next(self._numbers), [], 0, 0)
        self._set_chain(program, list(chain))
        program.prompt_chunks = len(chain)
        program.context_tokens = tokens
        program.is_finished = program.is_told = False
        program.refused_from = None
        program.running.add(request_id)
        self._by_request[request_id] = program
        self._heard_of(program, now_s)
        return program, goes_on

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
                    self._lengthen(program, chain[depth:])
                return program
        return None

    def end(self, request_id: str, now_s: float) -> ChainProgram | None:
        """A request is over; its program if nothing of it runs any more."""
        program = self._by_request.pop(request_id, None)
        if program is None:
            return None
        program.running.discard(request_id)
        if program.running:
            return None
        self._rest(program, now_s)
        return program

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
            self._make_room()
            program = ChainProgram(next(self._numbers), [], 0, 0)
        if program.running:
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
            self._rest(program, now_s)
        return program

    def heard_of(self, program: ChainProgram, now_s: float) -> None:
        """A turn of it ended of which nothing was looked up."""
        if not program.running and program.chain:
            self._rest(program, now_s)

    def forget(self, program: ChainProgram) -> None:
        """Nothing is known of it any more; its chunks are nobody's."""
        for request_id in program.running:
            self._by_request.pop(request_id, None)
        self._programs.pop(program, None)
        self._set_chain(program, [])
        self._watcher.forgot(program)

    def _continued(self, chain: Sequence[Chunk], tokens: int) -> ChainProgram | None:
        """The idle program that goes on: behind its context, or behind its prompt.

        Behind the prompt only, where the generated tokens come back in another form
        (stripped reasoning, another tokenisation). A prompt that others start with,
        too, is no sign of this program.
        """
        for depth in range(len(chain), 0, -1):
            chunk = chain[depth - 1]
            for program in self._by_end.get(chunk, ()):
                if not program.running and tokens >= program.context_tokens:
                    return program
            holders = self._holders.get(chunk, {})
            if len(holders) != 1 or depth == len(chain):
                continue
            (program,) = holders
            is_its_prompt = program.prompt_chunks == depth and not program.running
            if is_its_prompt and tokens >= program.context_tokens:
                return program
        return None

    def _rest(self, program: ChainProgram, now_s: float) -> None:
        self._heard_of(program, now_s)
        self._watcher.changed(program)

    def _heard_of(self, program: ChainProgram, now_s: float) -> None:
        program.seen_s = now_s
        self._programs[program] = None
        self._programs.move_to_end(program)

    def _lengthen(self, program: ChainProgram, more: Sequence[Chunk]) -> None:
        self._unlist_end(program)
        self._hold(program, more)
        program.chain.extend(more)
        self._list_end(program)

    def _set_chain(self, program: ChainProgram, chain: list[Chunk]) -> None:
        common = 0
        for old, new in zip(program.chain, chain, strict=False):
            if old != new:
                break
            common += 1
        self._unlist_end(program)
        self._release(program, program.chain[common:])
        self._hold(program, chain[common:])
        program.chain = chain
        self._list_end(program)

    def _hold(self, program: ChainProgram, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            holders = self._holders.get(chunk)
            if holders is None:
                self._holders[chunk] = {program: None}
                self._watcher.held(chunk)
            else:
                holders[program] = None
        self._watcher.changed(program)

    def _release(self, program: ChainProgram, chunks: Sequence[Chunk]) -> None:
        shared: ChainProgram | None = None
        for chunk in chunks:
            holders = self._holders.get(chunk)
            if holders is None:
                continue
            holders.pop(program, None)
            if holders:
                shared = next(iter(holders))
            else:
                del self._holders[chunk]
                self._watcher.freed(chunk)
        if shared is not None:  # of the deepest such chunk, so of all before it
            self._watcher.changed(shared)

    def _list_end(self, program: ChainProgram) -> None:
        if program.chain:
            self._by_end.setdefault(program.chain[-1], {})[program] = None

    def _unlist_end(self, program: ChainProgram) -> None:
        if program.chain:
            ending = self._by_end[program.chain[-1]]
            del ending[program]
            if not ending:
                del self._by_end[program.chain[-1]]

    def _make_room(self) -> None:
        while len(self) >= self._max:
            idle = (each for each in self._programs if not each.running)
            self.forget(next(idle, None) or next(iter(self._programs)))
