"""Others' load generators on docs/bench.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.report.figures.text import table

#: Before a load generator's name in the names of results.
PREFIX = "harness-"
_INTRO = """## Load generators of others

Unmodified, from their first line to their last, against plain vLLM and against vLLM
with TTLConnector's defaults: the demo's agents in each one's format, vLLM's CPU build
with the demo's tiny model, 2 cores. No client names programs, tools or last steps.
Means of pairs of runs on fresh servers, in alternating order, and ratios of the pairs
with their standard error."""


def harnesses(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A section with a table for each; nothing where there are no results."""
    own = [result for name, result in results.items() if name.startswith(PREFIX)]
    tables = [
        f"{result['package']}: `{result['command']}`\n\n"
        + table(
            ["its metric", "plain vLLM", "ttlcache", "ratio"],
            [[f"`{metric}`", *rest] for metric, *rest in result["rows"]],
        )
        for result in own
    ]
    return ["\n\n".join([_INTRO, *tables]) + "\n"] if own else []
