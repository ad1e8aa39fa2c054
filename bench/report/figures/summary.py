"""The results in README.md: what the committed numbers say, real servers first."""

from __future__ import annotations

from pathlib import Path

from bench.report import grid_verdict
from bench.report.figures import servers
from bench.report.figures.results import Json, Results

BEGIN = "<!-- results: written by `python -m bench figures` -->"
END = "<!-- end of results -->"


def render_summary(results: Results) -> str:
    """The whole section; empty where nothing of it was measured."""
    parts = [*_servers(results)]
    if "grid" in results:
        parts.append(_grid(results["grid"]))
    if not parts:
        return ""
    more = (
        "[Benchmarks](docs/benchmarks.md): every number with its command, the paper's "
        "figures beside ours, and where ttlcache loses."
    )
    return "\n\n".join(["## Results", *parts, more])


def _servers(results: Results) -> list[str]:
    parts = []
    if "validate" in results:
        parts.append(servers.validation(results["validate"]))
    if "pin-vs-reload" in results:
        parts.append(f"{servers.next_turn(results['pin-vs-reload'])}.")
    for name, result in results.items():
        if name.startswith(servers.PREFIX):
            parts.append(f"{servers.harness_in_short(result)}.")
    intro = "Real servers, on vLLM's CPU build with a tiny model, 2 cores:"
    return [intro, *parts] if parts else []


def _grid(grid: Json) -> str:
    """The verdict of all groups of cells, in sentences."""
    header, groups = grid_verdict.verdict(grid["rows"])
    names = ("number", "adaptive / base", "/ best rival", "behind")
    told = [
        f"{group[0]} ({cells}) {ratio}, over the best rival {best}, behind it in {lost}"
        for group in groups
        for cells, ratio, best, lost in [[group[header.index(name)] for name in names]]
    ]
    return (
        "Simulated, with vLLM's own scheduler and a roofline of Llama-3.1-8B on an "
        "A100-80 (no GPU was used): mean JCT of `adaptive` over that of the best of "
        "three readings of CacheTTL, by cells of workload, pool and load, with 95 % "
        f"intervals: {'; '.join(told)}. Headroom: an arm that knows the future wins."
    )


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
