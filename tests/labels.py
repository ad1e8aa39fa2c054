"""Label values of metrics that clients and models bring about: all there may be."""

#: Why a client's value is not used.
UNFIT_REASONS = frozenset(
    {
        *("id_type", "id_empty", "id_too_long", "id_range", "id_encoding"),
        *("bool_type", "duration", "priority_type", "priority_range"),
        *("tool_type", "tool_too_long", "tool_encoding", "too_many_tools"),
        *("number", "salt_type", "salt_too_long", "salt_encoding"),
        *("nested_too_deep", "nested_too_large", "nested_encoding"),
    }
)
#: Of tools, by name and command.
TOOL_CLASSES = frozenset(
    {
        *("final", "user", "approval", "parallel", "unknown", "subagent", "other"),
        *("shell-look", "shell-run", "shell"),
        *("search", "fetch", "edit", "read", "run"),
    }
)
