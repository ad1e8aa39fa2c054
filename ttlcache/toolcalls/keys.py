"""Gap keys of tool calls: names with their arguments."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from ttlcache.toolcalls.lenient_json import read_json
from ttlcache.toolcalls.shell import shell_key
from ttlcache.toolcalls.tool_names import key_for_name, runs_shell
from ttlcache.types import GapKey

_COMMAND_ARGUMENTS = ("command", "cmd", "commands", "script", "keystrokes")


def key_for_tool(
    name: str, arguments: Mapping[str, object] | str | None = None
) -> GapKey:
    """The gap key of one call of a named tool.

    Tools that ask a human or finish the program have reserved keys. A tool that
    runs a shell command has the key of its command, and its own name alone where
    the command is missing or half-written.

    Args:
        name: as the model or the client wrote it.
        arguments: the call's arguments, as a mapping or as JSON text; for a shell
            tool also the bare command.
    """
    key = key_for_name(name)
    return shell_key(_command(arguments), key.tool) if runs_shell(key) else key


def script_of(commands: Iterable[object]) -> str:
    """The shell script of a list of commands, or of keystrokes for a terminal."""
    lines = []
    for command in commands:
        if isinstance(command, Mapping):
            command = command.get("keystrokes", command.get("command"))
        if isinstance(command, str):
            lines.append(command)
    return "\n".join(lines)


def _command(arguments: Mapping[str, object] | str | None) -> str:
    if isinstance(arguments, str):
        if not arguments.lstrip().startswith("{"):
            return arguments
        value = read_json(arguments).value
        arguments = value if isinstance(value, dict) else None
    if not isinstance(arguments, Mapping):
        return ""
    for field in _COMMAND_ARGUMENTS:
        value = arguments.get(field)
        if isinstance(value, str):
            return value
        if isinstance(value, list | tuple) and value:
            return _list_command(field, value)
    return ""


def _list_command(field: str, items: list[object] | tuple[object, ...]) -> str:
    argv = [item for item in items if isinstance(item, str)]
    is_script = field == "commands" or len(argv) < len(items) or " " in argv[0]
    return script_of(items) if is_script else shlex.join(argv)
