"""docs/benchmarks.md from the numbers in bench/results. Pure text, deterministic."""

from __future__ import annotations

from collections.abc import Iterator

from bench.report import grid_verdict as verdict
from bench.report.figures import paper, servers
from bench.report.figures.results import Json, Results, gains, losses, table

_INTRO = """# Benchmarks

Written by `python -m bench figures` from `bench/results/*.json`; do not edit. JCT:
seconds from a program's first request to its last token, tools included. **Roofline**:
vLLM's own scheduler in virtual time, with step times computed from a GPU's peak rates.
[On a GPU](research/gpu-measurements.md): once. `oracle` knows the future.
"""
_PAPER = """## The paper's figures (roofline)

CacheTTL (arXiv 2511.02230 v4) and its first version. "Agrees" is said of `cachettl`,
our version of its rule; 1.20x means that vLLM's JCT is 1.20 times as long. Drawn
programs, Llama-3.1-8B on an A100 if nothing else is said, tiers written through.
`python -m bench figures --measure NAME` measures one again, NAME as its picture's file.
Not of the roofline: Fig. 3 and v1 Fig. 11 (drawn), Table 4 (CPU time).
"""
#: Parts of the grid's table of arms that the page has.
_ARM_COLUMNS = ("arm", "all", "p99", "held")
#: Worst points of all sweeps that are named.
_NAMED = 1


def render(results: Results) -> str:
    """The whole page. results: by name, as in bench/results."""
    titles = {
        "grid": "The grid (roofline)",
        "grid-untold": "The grid where no client names its last turn (roofline)",
    }
    parts = [
        _INTRO,
        servers.section(results),
        *(_grid(results[name], titles[name]) for name in titles if name in results),
        f"{_PAPER}\n{paper.section(results)}\n",
        "## Where ttlcache loses or does nothing\n",
        "\n".join(f"- {line}." for line in losses_of(results)) + "\n",
    ]
    return "\n".join(part for part in parts if part)


def losses_of(results: Results) -> Iterator[str]:
    """What got worse, or no better, wherever that was measured."""
    others = {n: r for n, r in results.items() if not n.startswith(servers.PREFIX)}
    worse = servers.losses(others)
    if len(others) < len(results):
        worse = ["what is in bold above", *worse]
    if worse:
        yield f"Real servers, worse by more than 1 %: {'; '.join(worse)}"
    if "validate" in results:
        error = servers.simulator_error(results["validate"])
        yield f"The simulator, with measured step times: {error}"
    if "grid" in results and (behind := verdict.behind(results["grid"]["rows"])):
        named = "; ".join(behind)
        yield f"Cells of the grid, another arm ahead by more than 1 %: {named}"
    swept = {name: each for name, each in results.items() if "drawn" in each}
    points = [(name, loss) for name, each in swept.items() for loss in losses(each)]
    points.sort(key=lambda point: -point[1].share)
    named = "; ".join(f"{name} at {loss}" for name, loss in points[:_NAMED])
    yield (
        "Points of the figures, another arm ahead by more than 1 %: "
        + (f"{len(points)}; the worst: {named}" if points else "none")
    )
    ties = {
        name: [abs(gain - 1) < 0.01 for gain in gains(each, verdict.OURS).values()]
        for name, each in swept.items()
    }
    told = (f"{name} {sum(t)} of {len(t)}" for name, t in ties.items() if any(t))
    yield f"Points within 1 % of plain vLLM: {', '.join(told) or 'none'}"
    slow = [
        f"`{row['load']}` {row['more_ms']:.2f} ms, {row['ratio']:.2f}x"
        for row in results.get("overhead", {}).get("rows", ())
        if row["ratio"] > 1.10 or row["more_ms"] > 0.1
    ]
    if slow:
        yield f"A step takes more (bar 0.1 ms, 1.10x): {'; '.join(slow)}"


def _grid(result: Json, title: str) -> str:
    setting, rows = result["setting"], result["rows"]
    seeds = {arm["seeds"] for row in rows for arm in row["arms"].values()}
    ends = dict.fromkeys(map(str, (min(seeds), max(seeds))))
    header, arms = verdict.arms(rows)
    columns = [header.index(name) for name in _ARM_COLUMNS]
    readings = sum(arm in rows[0]["arms"] for arm in verdict.READINGS)
    tell = "do not say" if "--no-tell-last" in setting["command"] else "say"
    lines = [
        f"## {title}",
        "",
        f"`{setting['command']}`: {setting['programs']} programs a seed, "
        f"{' to '.join(ends)} seeds, vLLM {setting['vllm']}. Load: share of "
        "the best arm's capacity. Base: the best of "
        f"{readings} readings of CacheTTL. Headroom: `oracle` takes at most "
        f"{verdict.HEADROOM:g} of the best other arm's. 95 % intervals. "
        f"First prompts begin alike. Clients {tell} their last turn. "
        "[Rivals]"
        "(../bench/README.md#how-far-to-trust-the-rivals).",
        f"{'; '.join(verdict.caveats(rows))}.",
        "",
        table(*verdict.verdict(rows)),
        "",
        "Best and worst cells:",
        "",
        table(*verdict.cells_against_best(rows)),
        "",
        "Geometric means over the base's; held: sessions with nine of ten turns "
        "answered within 30 s.",
        "",
        table(_ARM_COLUMNS, [[row[i] for i in columns] for row in arms]),
    ]
    return "\n".join(lines) + "\n"
