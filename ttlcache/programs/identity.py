"""Which program is this request? The first rule that applies wins."""

from __future__ import annotations

from ttlcache.programs.hints import ROUTE_PREFIX
from ttlcache.programs.model import Program, RequestRecord
from ttlcache.programs.prefix_index import PrefixIndex
from ttlcache.programs.table import ProgramTable, bounded, client_key
from ttlcache.types import Arrival, Finish, IdentityRule


class Identifier:
    """Applies the identity rules against the program table."""

    def __init__(self, programs: ProgramTable, prefixes: PrefixIndex) -> None:
        self._programs = programs
        self._prefixes = prefixes

    def identify(self, arrival: Arrival, now_s: float) -> tuple[Program, IdentityRule]:
        """The program of a request, created when it is new.

        It becomes a sub-agent of the program that its hint names as parent.
        """
        program, rule = self._find_or_create(arrival, now_s)
        parent_id = arrival.hints.parent_id
        if parent_id is not None and program.parent is None:
            parent = self._programs.get(client_key(arrival.tenant, parent_id))
            if parent is not None:
                program.adopt(parent)
        return program, rule

    def remember(self, record: RequestRecord, finish: Finish) -> None:
        """Make a finished turn of a program without an id recognisable.

        By its prompt as well: some clients drop what a turn put out.
        """
        number = record.program.key
        if not isinstance(number, int):
            return
        hashes, tokens = finish.hashes, finish.tokens
        stable_tokens = record.stable_tokens
        self._prefixes.remember(number, hashes, stable_tokens, tokens, is_prompt=True)
        self._prefixes.remember(number, hashes, finish.num_tokens - 1, tokens)

    def _find_or_create(
        self, arrival: Arrival, now_s: float
    ) -> tuple[Program, IdentityRule]:
        rule, label = self._explicit(arrival)
        if label is not None:
            key = client_key(arrival.tenant, label)
            return self._programs.get_or_create(key, now_s), rule
        program = self._prefixes.find(
            arrival.hashes, arrival.num_tokens, arrival.tokens, self._programs.get
        )
        if program is not None:
            self._programs.touch(program, now_s)
            return program, IdentityRule.PREFIX
        tenant = bounded(arrival.tenant)
        return self._programs.create_anonymous(tenant, now_s), IdentityRule.NEW

    @staticmethod
    def _explicit(arrival: Arrival) -> tuple[IdentityRule, str | None]:
        if arrival.hints.program_id is not None:
            return IdentityRule.HINT, arrival.hints.program_id
        session = arrival.session_id or None
        if session is not None and session.startswith(ROUTE_PREFIX):
            session = None
        return IdentityRule.SESSION, session
