"""The program table: who is who, in which order they came, what they wait for.

A program is an agent's whole job. Several of its turns may be in flight at once
(sub-agents, branches, retries); a finished turn that nobody continued yet is
"open". The table is bounded: idle programs are forgotten oldest first.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator

from ttlcache.programs.fair_queueing import Place, PlaceNumbers
from ttlcache.programs.model import ANONYMOUS_ID, ENGINE_KEYS, Program, ProgramKey

#: Longest client string kept as it is; of a longer one only a digest is.
MAX_KEY_CHARS = 256


def client_key(tenant: str, label: str) -> tuple[str, str]:
    """The key of an id that a client chose, inside a tenant that it chose as well.

    Bounded in size.
    """
    return bounded(tenant), bounded(label)


def bounded(text: str) -> str:
    """`text`, or a digest of it where it is long."""
    if len(text) <= MAX_KEY_CHARS:
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


#: Programs remembered at once; the longest idle is forgotten.
MAX_PROGRAMS = 100_000
#: A tenant whose last program ended still counts for so long: its next one may come.
TENANT_MEMORY_S = 60.0
_MAX_LEFT = 1024


class ProgramTable:
    """All live programs, least recently active first. O(1) per operation.

    engine_id: tells engines at one address apart, in ids of programs without one.
    """

    def __init__(
        self, idle_s: float, max_programs: int = MAX_PROGRAMS, engine_id: int = 0
    ) -> None:
        self.max_programs = max_programs
        self._idle_s = idle_s
        self._programs: OrderedDict[ProgramKey, Program] = OrderedDict()
        self._anonymous = engine_id * ENGINE_KEYS
        self.place_numbers = PlaceNumbers()
        self._tenants: Counter[str] = Counter()
        # Without a live program: when they were last seen, oldest end first.
        self._left: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs.values())

    def __reversed__(self) -> Iterator[Program]:
        return reversed(self._programs.values())

    def num_tenants(self, now_s: float) -> int:
        """Tenants with a live program, now or within `TENANT_MEMORY_S`."""
        left = self._left
        while left and now_s - next(iter(left.values())) > TENANT_MEMORY_S:
            left.popitem(last=False)
        return len(self._tenants) + len(left)

    def get(self, key: ProgramKey) -> Program | None:
        return self._programs.get(key)

    def find(self, tenant: str, program_id: str) -> Program | None:
        """A program by the id that its client chose, or by the one that we show.

        For orders only: no request joins another client's program by a number.
        """
        program = self._programs.get(client_key(tenant, program_id))
        shown = ANONYMOUS_ID.fullmatch(program_id)
        if program is None and shown is not None:
            key = int(shown[1], 16) * ENGINE_KEYS + int(shown[2])
            program = self._programs.get(key)
        is_theirs = program is not None and program.tenant == bounded(tenant)
        return program if is_theirs else None

    def new_place(self, tenant: str) -> Place:
        """A place in the queue for a context that begins now."""
        return Place(self.place_numbers.next(tenant))

    def get_or_create(self, key: tuple[str, str], now_s: float) -> Program:
        """The live program of `key`; an ended one is succeeded by a new one."""
        program = self._programs.get(key)
        if program is None:
            return self._create(key, key[0], now_s)
        program.last_seen_s = now_s
        self._programs.move_to_end(key)
        return program

    def create_anonymous(self, tenant: str, now_s: float) -> Program:
        """A new program without an id; its key is a number."""
        self._anonymous += 1
        return self._create(self._anonymous, tenant, now_s)

    def _create(self, key: ProgramKey, tenant: str, now_s: float) -> Program:
        program = Program(key, self.new_place(tenant), tenant=tenant)
        program.last_seen_s = now_s
        self._programs[key] = program
        self._tenants[tenant] += 1
        self._left.pop(tenant, None)
        return program

    def touch(self, program: Program, now_s: float) -> None:
        """Mark as active now. A program that was forgotten meanwhile stays so."""
        program.last_seen_s = now_s
        if self._programs.get(program.key) is program:
            self._programs.move_to_end(program.key)

    def remove(self, program: Program) -> None:
        """Forget; requests in flight keep their reference and see `ended`."""
        program.ended = True
        if self._programs.get(program.key) is program:
            del self._programs[program.key]
            self._tenants[program.tenant] -= 1
            if not self._tenants[program.tenant]:
                del self._tenants[program.tenant]
                self._left[program.tenant] = program.last_seen_s
                if len(self._left) > _MAX_LEFT:
                    self._left.popitem(last=False)

    def idle(self, now_s: float) -> Iterator[Program]:
        """Programs to forget now: silent too long, or too many of them.

        The caller removes each one before asking for the next. Programs with a
        turn in flight are never idle.
        """
        while self._programs:
            program = next(iter(self._programs.values()))
            is_idle = now_s - program.last_seen_s > self._idle_s
            if not is_idle and len(self._programs) <= self.max_programs:
                return
            if program.live_requests:
                # Active after all; what makes it old is a long turn.
                self._programs.move_to_end(program.key)
                program.last_seen_s = now_s
                if len(self._programs) > self.max_programs:
                    return
                continue
            yield program

    def next_idle_s(self) -> float | None:
        """When the next program may have to be forgotten, for simulators."""
        if not self._programs:
            return None
        return next(iter(self._programs.values())).last_seen_s + self._idle_s
