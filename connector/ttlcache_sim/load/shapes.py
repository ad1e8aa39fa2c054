"""The synthetic workloads by their moments. Adding one: one entry of `SHAPES`."""

from __future__ import annotations

from dataclasses import dataclass

from ttlcache_sim.load.gap_mix import Tool
from ttlcache_sim.load.programs import Moments

#: bash agent: `cd` hides what runs behind it and is the most frequent first word.
SWE_TOOLS = (
    Tool("cd", 0.40, 1.0, tail_share=0.941, two_parts=True),
    Tool("cat", 0.16, 0.15),
    Tool("grep", 0.12, 0.3),
    Tool("sed", 0.12, 0.15),
    Tool("ls", 0.06, 0.1),
    Tool("python", 0.09, 2.0),
    Tool("pytest", 0.05, 4.0),
)
#: web search agent.
BFCL_TOOLS = (
    Tool("search_web", 0.70, 1.0),
    Tool("fetch_url", 0.30, 0.75, tail_share=0.525),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A synthetic workload by its moments; tokens are the final context."""

    turns: Moments
    tool_s: Moments
    tokens: Moments
    tools: tuple[Tool, ...]


SHAPES = {
    # Paper, Table 2.
    "swe": Shape(
        Moments(10.9, 2.1), Moments(0.925, 3.550), Moments(70_126, 19_732), SWE_TOOLS
    ),
    "bfcl": Shape(
        Moments(6.3, 2.3), Moments(1.923, 2.133), Moments(93_256, 68_687), BFCL_TOOLS
    ),
    # Ours, no row in the paper: its longest programs have 50.6 turns; the spread is
    # that of openhands_example (35 / 11), gaps and tokens are SWE-bench's.
    "openhands": Shape(
        Moments(50.6, 16.0), Moments(0.925, 3.550), Moments(70_126, 19_732), SWE_TOOLS
    ),
}
