"""Tools in a dozen classes: gap keys are written by models, metric labels are not."""

from __future__ import annotations

from functools import lru_cache

from ttlcache.toolcalls.base import words
from ttlcache.toolcalls.tool_names import is_subagent
from ttlcache.types import APPROVAL_TOOL, FINAL_TOOL, PARALLEL_TOOL, USER_TOOL, GapKey

_RESERVED = {
    FINAL_TOOL: "final",
    USER_TOOL: "user",
    APPROVAL_TOOL: "approval",
    PARALLEL_TOOL: "parallel",
    "unknown": "unknown",
}
_LOOK = words(
    "awk cat cd cut diff du echo env file find git grep head id jq less ls nl pwd rg "
    "sed sort stat tail test tree wc which"
)
_RUN = words(
    "ant bazel bun cargo cmake conda ctest docker go gradle java javac jest make meson "
    "mvn mypy ninja node npm npx pip pip3 pnpm poetry pytest python python3 ruff tox "
    "tsc uv yarn"
)
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
        if key.executable in _LOOK:
            return "shell-look"
        return "shell-run" if key.executable in _RUN else "shell"
    name = key.tool.lower()
    if name in ("bash", "shell", "sh", "terminal"):
        return "shell"
    for kind, parts in _NAMES:
        if any(part in name for part in parts):
            return kind
    return "other"
