"""Names of tools, as models, clients and frameworks write them, and their gap keys."""

from __future__ import annotations

import re

from ttlcache.toolcalls.base import words
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
_RESERVED = frozenset({USER_TOOL, FINAL_TOOL, APPROVAL_TOOL, PARALLEL_TOOL})
_FOLD = re.compile(r"[\s_.\-]+")
_NAMESPACES = ("functions.", "function.", "tools.")
# What model APIs and MCP let a tool be called, and the separators of namespaces.
_NAME = re.compile(r"[A-Za-z0-9_.:-]+")
#: Longer than any API's limit (128): other text.
MAX_NAME_CHARS = 128


def key_for_name(name: str) -> GapKey:
    """The gap key of a tool of which only the name is known.

    Tools that ask a human or finish the program have reserved keys.
    """
    tool = tool_name(name)
    kind = _fold(tool)
    if kind in _APPROVAL_TOOLS:
        return APPROVAL_GAP
    if kind in _FINAL_TOOLS:
        return FINAL_GAP
    return GapKey(tool)


def runs_shell(key: GapKey) -> bool:
    """Whether a tool runs a shell command; key: as `key_for_name` gives it."""
    return _fold(key.tool) in _SHELL_TOOLS


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


def _fold(tool: str) -> str:
    # An MCP client prefixes the server: mcp__server__tool.
    return _FOLD.sub("", tool.rpartition("__")[2] or tool).lower()
