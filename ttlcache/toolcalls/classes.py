"""Tools in a dozen classes: gap keys are written by models, metric labels are not."""

from __future__ import annotations

from functools import lru_cache

from ttlcache.toolcalls.shell import PROGRAMS, is_quick
from ttlcache.toolcalls.tool_names import is_subagent
from ttlcache.types import APPROVAL_TOOL, FINAL_TOOL, PARALLEL_TOOL, USER_TOOL, GapKey

_RESERVED = {
    FINAL_TOOL: "final",
    USER_TOOL: "user",
    APPROVAL_TOOL: "approval",
    PARALLEL_TOOL: "parallel",
    "unknown": "unknown",
}
#: (class, parts of a tool's name), the first that fits.
_NAMES = (
    ("search", ("search", "query", "retriev")),
    ("fetch", ("fetch", "browse", "http", "url", "web", "download", "click", "navig")),
    ("edit", ("edit", "write", "replace", "patch", "create", "insert", "delete")),
    ("read", ("read", "view", "open", "cat", "list", "glob", "grep", "find", "ls")),
    ("run", ("run", "exec", "test", "python", "notebook", "code", "repl")),
)


@lru_cache(maxsize=4096)
def tool_class(key: GapKey) -> str:
    """The class of a gap: a metric label, whatever a model wrote."""
    if key.tool in _RESERVED:
        return _RESERVED[key.tool]
    if is_subagent(key):
        return "subagent"
    if key.executable:
        if is_quick(key.executable):
            return "shell-look"
        return "shell-run" if key.executable in PROGRAMS else "shell"
    name = key.tool.lower()
    if name in ("bash", "shell", "sh", "terminal"):
        return "shell"
    for kind, parts in _NAMES:
        if any(part in name for part in parts):
            return kind
    return "other"
