"""Terminal-Bench agents: one JSON object with keystrokes for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from ttlcache.toolcalls.keys import script_of
from ttlcache.toolcalls.lenient_json import read_objects
from ttlcache.toolcalls.shell import shell_key
from ttlcache.types import FINAL_GAP, GapKey

TERMINAL_TOOL = "terminal"
_TURN_FIELDS = frozenset(
    {"analysis", "plan", "state_analysis", "task_complete", "is_task_complete"}
)


def terminal_bench(text: str) -> tuple[GapKey, ...]:
    """`{"analysis": …, "commands": [{"keystrokes": …}], "task_complete": …}`.

    The commands of a turn run one after the other in one terminal: they are one
    script. No commands: the turn waits, or the task is complete.
    """
    if '"commands"' not in text:
        return ()
    for read in read_objects(text):
        if isinstance(read.value, Mapping):
            key = _turn_key(read.value)
            if key is not None:
                return (key,)
    return ()


def _turn_key(turn: Mapping[str, object]) -> GapKey | None:
    commands = turn.get("commands")
    if not isinstance(commands, list):
        return None
    has_keys = any(isinstance(c, Mapping) and "keystrokes" in c for c in commands)
    if not has_keys and _TURN_FIELDS.isdisjoint(turn):
        return None
    if not commands and _is_complete(turn):
        return FINAL_GAP
    return shell_key(script_of(commands), TERMINAL_TOOL)


def _is_complete(turn: Mapping[str, object]) -> bool:
    return any(turn.get(f) is True for f in ("task_complete", "is_task_complete"))
