"""The life of turns as the server sees it: whose they are, and what clients said.

A turn begins with a lookup and ends with its session, or when the engine says that it
is over: an engine that keeps KV by itself may end sessions much later, and looks
nothing up that it still has. Not thread-safe: the tier locks.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from ttlcache.types import UNKNOWN_GAP
from ttlcache_lmcache.config import ServerModuleConfig
from ttlcache_lmcache.hints import Hint
from ttlcache_lmcache.retention.program_table import ChainProgram, Chunk, ProgramTable
from ttlcache_lmcache.retention.return_estimator import ReturnEstimator

#: Requests remembered after their end, hints before it, and programs' names.
MEMORY = 8192
#: Of the requests that ended, so many are shown.
SHOWN = 32
#: Silent programs forgotten at a call: requests wait for it.
FORGOTTEN_AT_ONCE = 64

_Value = TypeVar("_Value")


class _Told(NamedTuple):
    """A hint that came before the turn's end did."""

    hint: Hint
    heard_s: float


class TurnLifecycle:
    """See the module's docstring."""

    def __init__(
        self,
        config: ServerModuleConfig,
        book: ProgramTable,
        returns: ReturnEstimator,
        counts: Counter[str],
    ) -> None:
        self._config = config
        self._book = book
        self._returns = returns
        self._counts = counts
        self._hints: OrderedDict[str, _Told] = OrderedDict()
        self._ended: OrderedDict[str, ChainProgram] = OrderedDict()
        self._named: OrderedDict[str, ChainProgram] = OrderedDict()
        self._deadlines: list[tuple[float, int, ChainProgram]] = []
        self._order = itertools.count()  # of equal deadlines

    # what is heard

    def lookup(
        self, request_id: str, chain: Sequence[Chunk], tokens: int, now_s: float
    ) -> None:
        """A request looks its prompt up."""
        program, goes_on = self._book.begin(request_id, chain, tokens, now_s)
        if goes_on:
            self._counts["turns_continued"] += 1
            self._returns.gap_ends(program, now_s)

    def ended(self, request_id: str, now_s: float) -> None:
        """The session of a request that looked something up is over."""
        known = self._book.of_request(request_id)
        if known is not None:
            self._returns.observe_service(now_s - known.seen_s)
            self._book.end(request_id, now_s)
            self._is_over(request_id, known, now_s)

    def stored(
        self, request_id: str, chain: Sequence[Chunk], tokens: int, now_s: float
    ) -> None:
        """The session of a request that only stored something is over."""
        known = self._ended.get(request_id)
        program = self._book.adopt(chain, tokens, known, now_s)
        if known is None and not program.is_running(now_s):
            self._is_over(request_id, program, now_s)

    def hint(self, hint: Hint, now_s: float) -> None:
        self._counts["hints"] += 1
        program = self._ended.get(hint.request_id)
        since_s = program.since_s if program is not None else now_s
        if program is None and hint.is_over:
            program = self._over_by_hint(hint, now_s)
        if program is None:
            _remember(self._hints, hint.request_id, _Told(hint, now_s))
        elif not program.is_running(now_s):
            self._decide(program, hint, since_s)

    def _is_over(self, request_id: str, program: ChainProgram, now_s: float) -> None:
        _remember(self._ended, request_id, program)
        told = self._hints.pop(request_id, None)
        if told is None:
            self._decide(program, None, now_s)
        else:
            since_s = told.heard_s if told.hint.is_over else now_s
            self._decide(program, told.hint, since_s)

    def _over_by_hint(self, hint: Hint, now_s: float) -> ChainProgram | None:
        """Whose turn it was that the engine says is over; None: not known yet."""
        program = self._book.of_request(hint.request_id)
        if program is not None:
            self._book.end(hint.request_id, now_s)
        elif hint.program is not None:
            program = self._named.get(hint.program)
            if program is not None:
                self._book.heard_of(program, now_s)
        if program is not None:
            _remember(self._ended, hint.request_id, program)
        return program

    # deadlines

    def _decide(self, program: ChainProgram, hint: Hint | None, since_s: float) -> None:
        """A turn ended, or more is known of one that did."""
        self._book.changed[program] = None
        program.is_finished = hint is not None and hint.is_last_step
        program.is_told = False
        program.since_s = program.deadline_s = since_s
        if hint is not None and hint.program:
            _remember(self._named, hint.program, program)
        told_key = hint.gap_key if hint is not None else None
        program.gap_key = told_key if told_key is not None else UNKNOWN_GAP
        if program.is_finished:
            self._counts["programs_finished"] += 1
            self._returns.no_gap(program)
            return
        self._returns.gap_begins(program, since_s)
        if hint is not None and hint.ttl_s is not None:
            program.is_told = True
            deadline_s = since_s + min(hint.ttl_s, self._config.max_ttl_s)
            program.deadline_s = deadline_s
            heapq.heappush(self._deadlines, (deadline_s, next(self._order), program))

    def pass_time(self, now_s: float) -> None:
        """Let deadlines pass, and forget the silent."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, _, program = heapq.heappop(self._deadlines)
            if program.is_running(now_s) or program.deadline_s != deadline_s:
                continue  # it went on, or got another deadline
            if program.is_told and program.chain:
                self._counts["expired"] += 1
                self._book.changed[program] = None
        self._forget_silent(now_s)

    def _forget_silent(self, now_s: float) -> None:
        horizon_s = now_s - self._config.program_idle_s
        for _ in range(FORGOTTEN_AT_ONCE):
            program = self._book.longest_silent()
            if program is None or program.seen_s > horizon_s:
                return
            self._book.forget(program)
            self._counts["forgotten"] += 1

    # what is shown

    def recent(self, now_s: float) -> list[dict[str, object]]:
        """The requests that ended last, the youngest first, and their deadlines."""
        ids = itertools.islice(reversed(self._ended), SHOWN)
        return [self._shown(request_id, now_s) for request_id in ids]

    def _shown(self, request_id: str, now_s: float) -> dict[str, object]:
        program = self._ended[request_id]
        return {
            "request_id": request_id,
            "ttl_s": round(program.deadline_s - program.since_s, 3),
            "left_s": round(program.deadline_s - now_s, 3),
            "is_told": program.is_told,
            "is_finished": program.is_finished,
            "is_kept": program.is_running(now_s) or program.is_in_ttl(now_s),
            "chunks": len(program.chain),
        }


def _remember(memory: OrderedDict[str, _Value], key: str, value: _Value) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > MEMORY:
        memory.popitem(last=False)
