"""The results in README.md: what the committed numbers say, real servers first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from bench.report import grid_verdict
from bench.report.figures import servers
from bench.report.figures.results import Json, Results, table

BEGIN = "<!-- results: written by `python -m bench figures` -->"
END = "<!-- end of results -->"


def render_summary(results: Results) -> str:
    """The whole section: what, the numbers, the command; empty without any."""
    body = [
        [*row, f"`{_command(result)}`"]
        for name, result in results.items()
        for kind, rows in _ROWS.items()
        if name.startswith(kind)
        for row in rows(result)
    ]
    if not body:
        return ""
    more = (
        "All but the last: real servers (vLLM's CPU build, tiny model, 2 cores). "
        "[Once on an H200](docs/research/gpu-measurements.md). "
        "[Benchmarks](docs/benchmarks.md): every loss."
    )
    header = ["what", "found", "command"]
    return "\n\n".join(["## Results", table(header, body, "---"), more])


def _command(result: Json) -> str:
    return str(result.get("command") or result["setting"]["command"])


def _validation(result: Json) -> Iterator[list[str]]:
    """Every load, from the shortest to the longest run; "-": not measured."""
    by_load = servers.jct_by_load(result)
    arms = list(dict.fromkeys(arm for own in by_load.values() for arm in own))
    told = "; ".join(
        ", ".join(
            f"{own[arm][0]:.1f}-{own[arm][-1]:.1f}" if arm in own else "-"
            for arm in arms
        )
        + f" at {load}"
        for load, own in by_load.items()
    )
    if told:
        names = ", ".join(f"`{arm}`" for arm in arms)
        agents = result["options"]["programs"]
        what = f"{agents} agents, last turns told"
        yield [what, f"mean JCT by run, s, {names}: {told}"]


def _harness(result: Json) -> Iterator[list[str]]:
    settings = result["options"].get("connector_config")
    beside = f", `{json.dumps(settings)}`" if settings else ""
    trace = Path(result["options"]["trace"] or "drawn agents").name
    what = f"{trace.partition('.')[0]}{beside}"
    yield [what, servers.harness_in_short(result)]


def _grid(grid: Json) -> Iterator[list[str]]:
    """The verdict of all cells together."""
    header, groups = grid_verdict.verdict(grid["rows"])
    cells, ratio, lost = (
        groups[-1][header.index(name)]
        for name in ("number", "adaptive / base", "behind")
    )
    yield [
        f"simulated A100 (roofline), {cells} cells",
        f"mean JCT {ratio} of CacheTTL's best reading; behind an arm in {lost}",
    ]


#: By the beginning of a result's name.
_ROWS = {"validate": _validation, servers.PREFIX: _harness, "grid": _grid}


def write_into(page: Path, text: str) -> None:
    """Replace what stands between the markers.

    Raises:
        ValueError: the page has no such place.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page}: expected {BEGIN!r} and {END!r}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
