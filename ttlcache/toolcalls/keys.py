"""Gap keys of named tools."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ttlcache.toolcalls.base import words
from ttlcache.toolcalls.lenient_json import read_json
from ttlcache.toolcalls.shell.command import join_argv, shell_key
from ttlcache.types import (
    APPROVAL_GAP,
    APPROVAL_TOOL,
    FINAL_GAP,
    FINAL_TOOL,
    KEY_PART_LIMIT,
    PARALLEL_TOOL,
    USER_TOOL,
    GapKey,
)

#: Stands for a call whose name is blank, or is no name but other text.
UNKNOWN_TOOL = "unknown_tool"

# Names are compared without case, "_", "-", "." and spaces.
_APPROVAL_TOOLS = words(
    """askuser askuserquestion askfollowupquestion askhuman askquestion askuserinput
    askuserforinput askforapproval askforconfirmation askapproval askforhumaninput
    requesthumanapproval requestapproval requestuserinput requesthumaninput
    requestuserapproval humaninput humanapproval humanassistance getuserinput
    gethumaninput getuserconfirmation confirmwithuser waitforuser waitforapproval
    messageaskuser exitplanmode"""
)
_FINAL_TOOLS = words(
    """finish submit attemptcompletion finalanswer taskcomplete taskcompleted
    completetask finishtask submitanswer submitsolution submitfinalanswer submitresult
    terminate done"""
)
_SUBAGENT_TOOLS = words(
    """task agent subagent delegate delegatetask delegatetoagent delegatework
    delegateworktocoworker spawnagent spawnsubagent dispatchagent launchagent
    callagent runagent runsubagent createsubagent newtask taskagent"""
)
_SHELL_TOOLS = words(
    """bash shell sh zsh terminal exec bashtool executebash runbash runcommand runcmd
    executecommand execcommand runshell runshellcommand shellcommand shelltool
    executeshell executeshellcommand localshell runterminalcmd runterminalcommand
    runinterminal terminalexecute containerexec cmdrun developershell
    bashcommand executeincontainer"""
)
_KNOWN_TOOLS = _APPROVAL_TOOLS | _FINAL_TOOLS | _SUBAGENT_TOOLS | _SHELL_TOOLS
_COMMAND_ARGUMENTS = ("command", "cmd", "commands", "script", "keystrokes")
_RESERVED = frozenset({USER_TOOL, FINAL_TOOL, APPROVAL_TOOL, PARALLEL_TOOL})
_FOLD = re.compile(r"[\s_.\-]+")
_NAMESPACES = ("functions.", "function.", "tools.")
# What model APIs and MCP let a tool be called, and the separators of namespaces.
_NAME = re.compile(r"[A-Za-z0-9_.:-]+")
#: Longer than any API's limit (128): other text.
MAX_NAME_CHARS = 128


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
    tool = tool_name(name)
    kind = _fold(tool)
    if kind in _APPROVAL_TOOLS:
        return APPROVAL_GAP
    if kind in _FINAL_TOOLS:
        return FINAL_GAP
    if kind in _SHELL_TOOLS:
        return shell_key(_command(arguments), tool)
    return GapKey(tool)


def is_subagent(key: GapKey) -> bool:
    """Whether a sub-agent runs in this gap, alone or beside other tools."""
    tools = key.executable.split("+") if key.tool == PARALLEL_TOOL else (key.tool,)
    return any(_fold(tool) in _SUBAGENT_TOOLS for tool in tools)


def tool_name(name: str) -> str:
    """`name` as it appears in keys: an identifier, bounded, never a reserved name.

    Names are written to files: text without a name's form is `UNKNOWN_TOOL`, but for
    phrases that frameworks are known to use ("Delegate work to coworker").
    """
    tool = name[: MAX_NAME_CHARS + 1].strip()
    for namespace in _NAMESPACES:
        tool = tool.removeprefix(namespace)
    if tool in _RESERVED:
        return "tool:" + tool
    if len(tool) <= MAX_NAME_CHARS and _NAME.fullmatch(tool):
        return tool[:KEY_PART_LIMIT]
    kind = _fold(tool)
    return kind if kind in _KNOWN_TOOLS else UNKNOWN_TOOL


def script_of(commands: Iterable[object]) -> str:
    """The shell script of a list of commands, or of keystrokes for a terminal."""
    lines = []
    for command in commands:
        if isinstance(command, Mapping):
            command = command.get("keystrokes", command.get("command"))
        if isinstance(command, str):
            lines.append(command)
    return "\n".join(lines)


def _fold(tool: str) -> str:
    # An MCP client prefixes the server: mcp__server__tool.
    return _FOLD.sub("", tool.rpartition("__")[2] or tool).lower()


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
    return script_of(items) if is_script else join_argv(argv)
