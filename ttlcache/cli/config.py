"""`ttlcache config`: every key of `kv_connector_extra_config`, as a Markdown table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ttlcache.cli.common import fail
from ttlcache.config import TTLCacheConfig

#: When somebody would want another value than the default.
CHANGE_WHEN = {
    "policy": "the results on your own trace say so (`python -m bench sim`)",
    "ordering": "single requests matter more than whole programs: `request-fcfs`",
    "admission": "a new program's first answer matters most: `none`",
    "max_pinned_fraction": "chats without tools share the server and wait too long",
    "max_ttl_s": "gaps last longer and memory is idle",
    "max_queue_wait_s": "somebody watches: lower; batch jobs only: higher",
    "program_idle_s": "agents pause for longer, e.g. for people",
    "tool_call_parser": "`none`: clients send `tool`, or outputs must not be read",
    "record_path": "you want `ttlcache report`, `explain` or `plot`",
    "allow_untested_vllm": "you accept that nobody has tried this version",
}
_TABLE = re.compile(r"^\| key \|.*\n(?:\|.*\n)*", re.MULTILINE)
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}


def config(
    into: Annotated[
        Path | None, typer.Option(help="Replace the table in this page.")
    ] = None,
) -> None:
    """Print the configuration table of the documentation."""
    if into is None:
        typer.echo(table())
        return
    try:
        page, count = _TABLE.subn(lambda _: table() + "\n", into.read_text(), count=1)
        if not count:
            fail(f"{into} has no table that begins with | key |")
        into.write_text(page)
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{into}: {error}")


def table() -> str:
    """The table in docs/configuration.md."""
    rows = ["| key | type | default | meaning | change it when |"]
    rows.append("|---|---|---|---|---|")
    schemas = TTLCacheConfig.model_json_schema()["properties"]
    for name, field in TTLCacheConfig.model_fields.items():
        default = field.get_default(call_default_factory=True)
        cells = (
            f"`{name}`",
            _kind(schemas[name]),
            f"`{json.dumps(default)}`",
            str(field.description),
            CHANGE_WHEN.get(name, ""),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _kind(schema: dict[str, Any]) -> str:
    """The type as an operator writes it in JSON, with its range."""
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    types = schema.get("anyOf", [schema])
    kind = " or ".join(part["type"].replace("boolean", "bool") for part in types)
    bounds = (f"{sign} {types[0][b]:g}" for b, sign in _BOUNDS.items() if b in types[0])
    return ", ".join([kind, *bounds])
