"""Makes the calls of an engine adapter, with nothing behind them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from typing import Any

from ttlcache.clock import Clock
from ttlcache.config import load_config
from ttlcache.controller import Controller
from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.types import (
    NO_HINTS,
    Arrival,
    Finish,
    GapKey,
    Hints,
    PinOutcome,
    Pressure,
    ReleaseMode,
    Shrunk,
)

#: How a program is known: see `Agent`.
IDENTITIES = ("hint", "session", "prefix")
BLOCK_TOKENS = 16
CONTEXT_TOKENS = 8_192
#: Tokens by which a context grows a turn, and how many of them are generated.
TURN_TOKENS = 64
OUTPUT_TOKENS = 32
HASH_BYTES = 32
#: Seconds to rebuild any context: most gaps are then worth a pin.
RECOVERY_S = 8.0

_TOOLS = ("search", "fetch", "edit", "read", "bash")
#: A full pool before a queue: the price of memory is not 0.
_BUSY = Pressure(
    pool_blocks=1 << 24,
    free_blocks=1 << 20,
    num_running=50,
    num_waiting=20,
    memory_is_short=True,
)


def machine() -> dict[str, Any]:
    """What microseconds depend on."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "load": os.getloadavg(),
    }


class NullHolder:
    """A `BlockHolder` without blocks."""

    def release(self, pin_id: int, outcome: PinOutcome, mode: ReleaseMode) -> int:
        return 0

    def shrink(self, pin_id: int, drop_blocks: int, mode: ReleaseMode) -> Shrunk | None:
        return None

    def is_freeable(self, pin_id: int) -> bool:
        return True

    def count_freeable(self, pin_ids: Iterable[int], enough: int) -> int:
        return enough

    def pressure(self) -> Pressure:
        return _BUSY


def make_controller(
    policy: str, clock: Clock, *, gaps: GapHistory | None = None
) -> Controller:
    """A controller with the defaults.

    Virtual time stands still between admission and the first token, so that the
    stated cost of recovery is not refitted.
    """
    return Controller(
        load_config({"policy": policy}),
        clock,
        NullHolder(),
        BLOCK_TOKENS,
        gaps=gaps,
        costs=CostModel(prefill=[0.0, 0.0, RECOVERY_S]),
    )


class Agent:
    """One program: its next request, and its end.

    identity: "hint" (program id, tool and last step told), "session" (an id and
    nothing else), "prefix" (nothing: recognised by its growing prompt).
    """

    def __init__(self, number: int, identity: str, context_tokens: int) -> None:
        self.turns = 0
        self._label = f"agent-{number}"
        self._identity = identity
        self._tool = _TOOLS[number % len(_TOOLS)]
        self._tokens = context_tokens
        self._base = number << 24  # token ids that no other agent has
        self._prefix = number.to_bytes(HASH_BYTES - 4, "big")
        self._hashes: list[bytes] = []

    def arrival(self, *, is_last: bool = False) -> Arrival:
        """The next request, its prompt extending the last turn's output."""
        hints = NO_HINTS
        if self._identity == "hint":
            hints = Hints(
                program_id=self._label, tools=(self._tool,), is_last_step=is_last
            )
        return Arrival(
            request_id=f"{self._label}/{self.turns}",
            num_tokens=self._tokens,
            hashes=self._hashes_of(self._tokens),
            tokens=self._slice,
            hints=hints,
            session_id=self._label if self._identity == "session" else None,
        )

    def finish(self) -> Finish:
        """The end of the turn that arrived last; the next one will be longer."""
        num_tokens = self._tokens + OUTPUT_TOKENS
        hashes = self._hashes_of(num_tokens)
        finish = Finish(
            request_id=f"{self._label}/{self.turns}",
            completed=True,
            num_tokens=num_tokens,
            prompt_tokens=self._tokens,
            hashes=hashes,
            tokens=self._slice,
            kv_blocks=len(hashes),
            kv_tokens=len(hashes) * BLOCK_TOKENS,
            read_tool=self._read_tool,
        )
        self.turns += 1
        self._tokens += TURN_TOKENS
        return finish

    def _hashes_of(self, num_tokens: int) -> list[bytes]:
        num_blocks = num_tokens // BLOCK_TOKENS
        for index in range(len(self._hashes), num_blocks):
            self._hashes.append(self._prefix + index.to_bytes(4, "big"))
        return self._hashes[:num_blocks]

    def _slice(self, start: int, stop: int) -> range:
        return range(self._base + start, self._base + stop)

    def _read_tool(self) -> GapKey:
        return GapKey(self._tool)
