"""Bring what lies on disk back to CPU memory shortly before its program returns."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ttlcache.controller import Controller
from ttlcache.estimators.returns import expected_gap_s
from ttlcache.programs.model import Pin, Program, Turn
from ttlcache.types import PinOutcome
from ttlcache_connector.tiers.base import SchedulerTier

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: How long before the expected return, where no reload from disk was seen yet.
LEAD_S = 1.0
#: Turns remembered at once; the rest is promoted at arrival.
MAX_TURNS = 10_000
#: And their tokens, four bytes each: a return may be hours away.
MAX_TOKENS = 32_000_000


@dataclass(order=True)
class _Waiting:
    due_s: float
    number: int
    program: Program = field(compare=False)
    turn: Turn = field(compare=False)
    request_id: str = field(compare=False)
    tokens: Sequence[int] = field(compare=False)
    salt: str = field(compare=False)


class Promoter:
    """Turns that went below, in order of their expected return."""

    def __init__(self, tier: SchedulerTier, controller: Controller) -> None:
        self._tier = tier
        self._controller = controller
        self._pinned: dict[str, Request] = {}
        self._waiting: list[_Waiting] = []
        self._number = 0
        self._num_tokens = 0

    def pinned(self, request: Request) -> None:
        """The turn may go below later."""
        if len(self._pinned) < MAX_TURNS:
            self._pinned[request.request_id] = request

    def pin_ended(
        self, pin: Pin, outcome: PinOutcome, request_id: str, now_s: float
    ) -> None:
        """It went below if its pin expired."""
        request = self._pinned.pop(request_id, None)
        if request is None or outcome is not PinOutcome.EXPIRED:
            return
        if len(self._waiting) >= MAX_TURNS:
            return
        controller, turn = self._controller, pin.turn
        gap_s = expected_gap_s(controller.gaps, turn.gap_key, now_s - turn.finish_s)
        if gap_s is None:
            return
        lead_s = controller.costs.reload_s("disk", turn.context_tokens)
        due_s = turn.finish_s + gap_s - (lead_s if math.isfinite(lead_s) else LEAD_S)
        self._number += 1
        tokens = array("I", list(request.all_token_ids)[: turn.context_tokens])
        if self._num_tokens + len(tokens) > MAX_TOKENS:
            return
        self._num_tokens += len(tokens)
        heapq.heappush(
            self._waiting,
            _Waiting(
                due_s,
                self._number,
                pin.program,
                turn,
                request_id,
                tokens,
                request.cache_salt or "",
            ),
        )

    def tick(self, now_s: float) -> None:
        """Start what is due, one at a time; whoever came back needs it no more."""
        while self._waiting and self._waiting[0].due_s <= now_s:
            first = self._waiting[0]
            if _is_expected(first) and not self._tier.promote(
                first.request_id, first.tokens, first.salt
            ):
                return
            self._num_tokens -= len(heapq.heappop(self._waiting).tokens)


def _is_expected(waiting: _Waiting) -> bool:
    program = waiting.program
    if program.ended or program.in_flight:
        return False
    # Half of them are back before the median, and may be out again when it comes.
    return waiting.turn in program.open_turns
