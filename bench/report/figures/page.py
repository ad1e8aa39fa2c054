"""docs/bench.md from the numbers in bench/results. Pure text, deterministic."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.report import grid_verdict as verdict
from bench.report.figures import fleets, tiers
from bench.report.figures.harnesses import PREFIX, harnesses
from bench.report.figures.text import table

Json = Mapping[str, Any]
_INTRO = """# Bench report

Written by `python -m bench figures` from `bench/results/*.json`; do not edit. Every
section names the command that measured it. JCT: seconds from a program's first request
to its last token, tool gaps included. What says nothing else is vLLM's own scheduler
and ours in virtual time, with a step-time model of Llama-3.1-8B on an A100-80
(`bench/sim`): no GPU was used, and seconds are the model's. `oracle` knows the future;
it is a reference point, not a bound. Sections were not all measured with the same
version of the code: `git log bench/results/NAME.json` tells when.
"""
#: Metric, title and digits of sweeps that say nothing else.
JCT_TABLES = (
    ("mean_jct_s", "mean JCT, s", 0),
    ("p90_jct_s", "P90 JCT, s", 0),
    ("p95_jct_s", "P95 JCT, s", 0),
)
#: Results that are no sweep.
_OTHERS = ("grid", "grid-untold", "overhead", "pin-vs-reload")


def render(results: Mapping[str, Json]) -> str:
    """The whole page. results: by name, "grid", "overhead" or a sweep's."""
    parts = [_INTRO]
    if "grid" in results:
        parts.append(_grid(results["grid"], "The grid"))
    if "grid-untold" in results:
        title = "The grid where no client says that a program is over"
        parts.append(_grid(results["grid-untold"], title))
    for name, result in results.items():
        if name not in _OTHERS and not name.startswith(PREFIX):
            parts.append(_sweep(name, result))
    if "pin-vs-reload" in results:
        parts.append(tiers.pin_vs_reload(results["pin-vs-reload"]))
    parts += harnesses(results)
    if "overhead" in results:
        parts.append(_overhead(results["overhead"]))
    return "\n".join(parts)


def programs_of(result: Json) -> str:
    """How many programs, in words; results of before were 40 a cell."""
    programs = result["programs"]
    return programs if isinstance(programs, str) else f"{programs} programs a cell"


def tables_of(result: Json) -> Sequence[Sequence[Any]]:
    tables: Sequence[Sequence[Any]] = result.get("tables", JCT_TABLES)
    return tables


def by_arm(result: Json, key: str) -> dict[str, dict[str, float]]:
    """Mean over the seeds, by arm and x, both in the order of the rows."""
    seen: dict[str, dict[str, list[float]]] = {}
    for row in result["rows"]:
        if key in row:
            seen.setdefault(row["arm"], {}).setdefault(row["x"], []).append(row[key])
    return {
        arm: {x: statistics.fmean(values) for x, values in own.items()}
        for arm, own in seen.items()
    }


def losses(result: Json) -> list[str]:
    """Where `adaptive` is behind another arm that knows no future, by over 1 %."""
    means = by_arm(result, "mean_jct_s")
    ours = means.get("adaptive", {})
    found = []
    for x, mine in ours.items():
        rivals = {
            arm: own[x]
            for arm, own in means.items()
            if arm.partition(":")[0] not in ("adaptive", "oracle") and x in own
        }
        best = min(rivals, key=lambda arm: rivals[arm], default="")
        if best and mine > 1.01 * rivals[best]:
            found.append(f"{x}: {best} by {100 * (mine / rivals[best] - 1):.1f} %")
    return found


def _sweep(name: str, result: Json) -> str:
    lines = [
        f"## {result['title']}",
        "",
        f"After the {result['source']}. {programs_of(result)}, vLLM "
        f"{result['vllm']}: `{result['command']}`. {result['note']}".rstrip(),
        "",
        f"![{name}](bench/{name}.png)",
        "",
    ]
    # Columns in the order of the points, whatever arm has which.
    xs = list(dict.fromkeys(row["x"] for row in result["rows"]))
    for key, title, digits in tables_of(result):
        header = [title, *(f"{result['x']} {x}" for x in xs)]
        rows = [
            [f"`{arm}`", *(f"{own[x]:.{digits}f}" if x in own else "" for x in xs)]
            for arm, own in by_arm(result, key).items()
        ]
        lines += [table(header, rows), ""]
    lines += fleets.notes(name, result)
    if (
        any(row["arm"] == "adaptive" for row in result["rows"])
        and len(by_arm(result, "mean_jct_s")) > 1
        and name not in fleets.NAMES
    ):
        behind = losses(result)
        where = f"at {'; '.join(behind)}" if behind else "nowhere"
        # A sweep has some arms only: others may well be ahead.
        lines.append(f"Among these arms adaptive is behind {where}.")
    return "\n".join(lines) + "\n"


def _grid(result: Json, title: str) -> str:
    setting, rows = result["setting"], result["rows"]
    seeds = sorted({arm["seeds"] for row in rows for arm in row["arms"].values()})
    lines = [
        f"## {title}",
        "",
        f"Workloads x pools x loads, lines `{setting['half']}` of the traces, "
        f"{setting['programs']} programs a seed between warm-up and drain, "
        f"{seeds[0]} to {seeds[-1]} seeds, vLLM {setting['vllm']}: "
        f"`{setting['command']}`. A load is a share of the capacity: programs that the "
        "best arm completes a second when there are always more. A cell's base is the "
        f"best of {', '.join(f'`{arm}`' for arm in verdict.READINGS)}. Intervals are "
        "95 %, by paired bootstrap over blocks of programs; seeds are added to an arm "
        f"until its interval is within 2 % or all above {verdict.FAR:g}. Pool "
        "`offload` is the small one above a CPU tier that is written through (`demote: "
        "write-through`; a server's default is `on-pressure`). Rivals are our own "
        "versions; how far to trust each is in [bench/README.md](../bench/README.md"
        "#how-far-to-trust-the-rivals).",
        *(f"{caveat}." for caveat in verdict.caveats(rows)),
        "",
        table(*verdict.verdict(rows)),
        "",
        "With headroom: `oracle` takes at most "
        f"{verdict.HEADROOM:g} of the best other arm's mean JCT. Mean JCT over the "
        "base's; ~: not known within 2 %.",
        "",
        table(*verdict.cells(rows)),
        "",
        "Geometric means over the cells, over the base's; percentiles of JCT, the "
        "worst turn and TTFT are of the first seeds, which all arms have. Held: "
        "sessions of which nine of ten turns begin to answer within 30 s.",
        "",
        table(*verdict.arms(rows)),
    ]
    return "\n".join(lines) + "\n"


def _overhead(result: Json) -> str:
    body = [
        [
            row["load"],
            f"{row['plain_ms']:.3f}",
            f"{row['idle_ms']:.3f}",
            f"{row['ours_ms']:.3f}",
            f"{row['ratio']:.3f}",
            f"{row['more_ms']:.3f}",
            f"{row['idle_more_ms']:.3f}",
            f"{row['same_ms']:.3f}",
            "pass" if row["ratio"] <= 1.10 and row["more_ms"] <= 0.1 else "FAIL",
        ]
        for row in result["rows"]
    ]
    header = ["load", "vLLM ms", "any connector ms", "TTLScheduler ms"]
    header += ["ratio", "more ms", "of it any connector's", "vLLM to itself", "bar"]
    programs = f"{result['running']} running and {result['waiting']} waiting programs"
    return (
        "## Scheduler overhead\n\n"
        f"After the paper's Table 4. CPU milliseconds a step, {programs}, engines in "
        f"turns in one process: `{result['command']}`. Bars: ratio 1.10, 0.1 ms "
        'more. "Any connector" is vLLM with one whose hooks do nothing; "vLLM to '
        'itself" is the most by which two equal engines differ.\n\n'
        "![overhead](bench/overhead.png)\n\n"
        f"{table(header, body)}\n"
    )
