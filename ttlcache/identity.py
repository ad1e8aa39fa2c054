"""Which program is this request? First rule that applies wins (DESIGN §3)."""

from __future__ import annotations

from collections.abc import Sequence

from ttlcache.events import Arrival
from ttlcache.prefixes import PrefixIndex, TokenSlice
from ttlcache.programs import Program, ProgramTable, bounded, client_key
from ttlcache.types import IdentityRule


class Identifier:
    """Applies the identity rules against the program table."""

    def __init__(self, programs: ProgramTable, prefixes: PrefixIndex | None) -> None:
        self._programs = programs
        self._prefixes = prefixes

    def identify(self, arrival: Arrival, now_s: float) -> tuple[Program, IdentityRule]:
        """The program of a request, created when it is new."""
        rule, label = self._explicit(arrival)
        if label is not None:
            key = client_key(arrival.tenant, label)
            return self._programs.get_or_create(key, now_s), rule
        program = self._by_prefix(arrival)
        if program is not None:
            self._programs.touch(program, now_s)
            return program, IdentityRule.PREFIX
        tenant = bounded(arrival.tenant)
        return self._programs.create_anonymous(tenant, now_s), IdentityRule.NEW

    def remember(
        self,
        program: Program,
        hashes: Sequence[bytes],
        num_tokens: int,
        tokens: TokenSlice,
    ) -> None:
        """Make a context of an anonymous program recognisable."""
        if self._prefixes is not None and isinstance(program.key, int):
            self._prefixes.remember(program.key, hashes, num_tokens, tokens)

    @staticmethod
    def _explicit(arrival: Arrival) -> tuple[IdentityRule, str | None]:
        if arrival.hints.program_id is not None:
            return IdentityRule.HINT, arrival.hints.program_id
        return IdentityRule.SESSION, arrival.session_id or None

    def _by_prefix(self, arrival: Arrival) -> Program | None:
        if self._prefixes is None:
            return None
        return self._prefixes.find(
            arrival.hashes, arrival.num_tokens, arrival.tokens, self._programs.get
        )
