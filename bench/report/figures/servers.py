"""What was measured on real servers: gains, and what got worse with ttlcache."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from bench.report.figures.results import Json, Results, table
from bench.report.grid_verdict import OURS, TIE

#: Before a load generator's name in the names of results.
PREFIX = "harness-"
#: In the names of metrics of which more is better.
_MORE_IS_BETTER = (
    *("successful", "completed", "throughput", "cache_ratio", "ttft_pct", "reuse"),
    "prompt_hit",
)
#: Ends of names of metrics that others follow from.
_SHOWN_IF_WORSE = ("tpot_ms", "itl_p99_ms", "e2e_overall.mean_ms", "cache_ratio")
#: Of the demo.
_DEMO = {
    "mean_jct_s": "mean JCT, s",
    "p99_turn_s": "turn p99, s",
    "prompt_hit": "prompt hit",
}
#: Failed checks that are named where words are few.
_NAMED = 4
#: Of agentic-bench: seconds that a job waited for the server.
_JOBS = "mean_trajectory_time_s"
#: Arms of the demo, and what each is held against.
_PAIRS = {"ttlcache": "vanilla", "ttlcache+cpu": "lmcache"}


@dataclass(frozen=True, slots=True)
class Compared:
    """One metric with ttlcache and without; text: what is said of it."""

    metric: str
    ours: float
    base: float
    text: str

    @property
    def times_worse(self) -> float:
        """Below 1: better."""
        worse, better = self.ours, self.base
        if any(word in self.metric for word in _MORE_IS_BETTER):
            worse, better = better, worse
        return worse / better if better else math.inf if worse else 1.0

    @property
    def is_worse(self) -> bool:
        return self.times_worse > TIE


def section(results: Results) -> str:
    """Nothing where no server was measured."""
    parts = [
        _SECTIONS[name.partition("-")[0]](result)
        for name, result in results.items()
        if name.partition("-")[0] in _SECTIONS
    ]
    intro = "vLLM's CPU build with a tiny model on 2 cores."
    return "\n\n".join(["## Real servers", intro, *parts]) + "\n" if parts else ""


def losses(results: Results) -> list[str]:
    """What is worse with ttlcache by more than 1 %, by result."""
    found = {
        name.removeprefix(PREFIX): [c.text for c in compare(result) if c.is_worse]
        for name, result in results.items()
        for kind, compare in _COMPARISONS.items()
        if name.startswith(kind)
    }
    return [f"{name}: {', '.join(worse)}" for name, worse in found.items() if worse]


# --- the simulator against servers -------------------------------------------


def validation(result: Json) -> str:
    """Mean JCT by load and arm, with the simulator's error in brackets."""
    cells = _cells(result)
    arms, loads = (list(dict.fromkeys(own)) for own in zip(*cells, strict=True))
    body = [[load, *(_measured(cells[arm, load]) for arm in arms)] for load in loads]
    return table(["mean JCT, s (simulator)", *(f"`{arm}`" for arm in arms)], body)


def jct_by_load(result: Json) -> dict[str, dict[str, list[float]]]:
    """Seconds of mean JCT by load and arm, of each run, the shortest first."""
    found: dict[str, dict[str, list[float]]] = {}
    for (arm, load), cell in _cells(result).items():
        if cell["measured"]:
            runs = sorted(run["mean_jct_s"] for run in cell["measured"])
            found.setdefault(load, {})[arm] = runs
    return found


def simulator_error(result: Json) -> str:
    """The largest errors of a cell, and the checks that fail."""
    counted = [each for each in result["cells"] if each["measured"]]
    if not counted:
        return "no run counts"
    jct, hit = (
        max((_error(each, key) for each in counted), key=abs)
        for key in ("mean_jct_s", "prompt_hit")
    )
    checks = result["checks"]
    failed = [f"{c['name']} {c['found']}" for c in checks if not c["ok"]]
    named = f" ({'; '.join(failed[:_NAMED])})" if failed else ""
    return (
        f"largest error {jct:+.0%} in mean JCT, {hit:+.0%} in prompt hit; "
        f"{len(failed)} of {len(checks)} checks fail{named}"
    )


def _validate(result: Json) -> str:
    options, discarded = result["options"], ""
    if result["discarded"]:
        discarded = f" {result['discarded']} runs, whose server waited, do not count."
    return (
        f"{options['programs']} of the demo's agents, which say their last turn, up "
        f"to {options['rounds']} runs a cell: `{result['command']}`. In brackets the "
        "error of the simulator with this machine's measured step times."
        f"{discarded}\n\n{validation(result)}"
    )


def _cells(result: Json) -> dict[tuple[str, str], Json]:
    """By arm and load."""
    split = ((each["name"].partition(" at "), each) for each in result["cells"])
    return {(arm, load): each for (arm, _, load), each in split}


def _measured(cell: Json) -> str:
    if not cell["measured"]:
        return ""
    return f"{_mean(cell, 'mean_jct_s'):.1f} ({_error(cell, 'mean_jct_s'):+.0%})"


def _mean(cell: Json, key: str) -> float:
    return statistics.fmean(run[key] for run in cell["measured"])


def _error(cell: Json, key: str) -> float:
    return float(cell["predicted"][key] / _mean(cell, key) - 1.0)


def _against_rivals(result: Json) -> Iterator[Compared]:
    """Mean JCT, and the longest turns, at each load, against each other arm."""
    cells = {where: c for where, c in _cells(result).items() if c["measured"]}
    for key, name in {"mean_jct_s": "mean JCT", "p99_turn_s": "turn p99"}.items():
        for (arm, load), cell in cells.items():
            if arm == OURS or (OURS, load) not in cells:
                continue
            ours, base = _mean(cells[OURS, load], key), _mean(cell, key)
            text = f"{name} {ours / base:.2f}x `{arm}` at {load}"
            yield Compared(key, ours, base, text)


# --- load generators of others -----------------------------------------------


def _harness(result: Json) -> str:
    rounds = result["options"]["rounds"]
    compared = list(_by_metric(result))
    better = ", ".join(
        c.text
        for c in compared
        if c.times_worse < 1 / TIE and not c.metric.endswith(_SHOWN_IF_WORSE)
    )
    worse = ", ".join(c.text for c in compared if c.is_worse)
    return (
        f"`{result['command']}`, {rounds} pair{'s' * (rounds > 1)}, over "
        f"{_base(result)}: {better}; "
        f"**worse: {worse or 'none'}**."
    )


def harness_in_short(result: Json) -> str:
    """How long jobs took, or else what got better first; and all that got worse."""
    compared = list(_by_metric(result))
    jobs = [c.text for c in compared if c.metric.endswith(_JOBS)]
    better = [c.text for c in compared if c.times_worse < 1 / TIE]
    (first, *_) = [*jobs, *better, "nothing better"]
    worse = ", ".join(c.text for c in compared if c.is_worse) or "nothing"
    return f"over {_base(result)}: {first}; worse: {worse}"


def _base(result: Json) -> str:
    if result["options"].get("against") == "lmcache":
        return "LMCache's connector"
    return "plain vLLM"


def _by_metric(result: Json) -> Iterator[Compared]:
    for metric, *means, ratio in result["rows"]:
        base, ours = (float(text.replace(",", "")) for text in means)
        # There is no ratio to nothing.
        told = f"{ratio.replace(' ', '')}x" if ratio else f"{base:g} to {ours:g}"
        text = f"`{metric.removeprefix('metrics.')}` {told}"
        yield Compared(metric, ours, base, text)


# --- the demo; hold, reload or prefill ---------------------------------------


def _demo(result: Json) -> str:
    body = [
        [f"`{arm}`", *(f"{_of_demo(result, arm, key):.3g}" for key in _DEMO)]
        for arm in result["rounds"][0]
    ]
    intro = f"{result['options']['programs']} agents: `{result['command']}`."
    return f"{intro}\n\n{table(['arm', *_DEMO.values()], body)}"


def _of_demo(result: Json, arm: str, key: str) -> float:
    return statistics.fmean(each[arm][key] for each in result["rounds"])


def _in_pairs(result: Json) -> Iterator[Compared]:
    for arm, rival in _PAIRS.items():
        for key, name in _DEMO.items():
            ours, base = (_of_demo(result, each, key) for each in (arm, rival))
            text = f"{name} `{arm}` {ours:.3g}, `{rival}` {base:.3g}"
            yield Compared(key, ours, base, text)


def next_turn(result: Json) -> str:
    """One sentence: the longest context."""
    row = result["recoveries"][-1]
    return (
        f"The next turn of a {row['context_tokens']:,}-token context takes "
        f"{row['prefill_s']:.1f} s with a prefill, {row['cpu_s']:.2f} s from CPU "
        f"memory (LMCache), {row['disk_s']:.2f} s from disk, {row['claimed_s']:.2f} s "
        "from a pin"
    )


def _pin_vs_reload(result: Json) -> str:
    picture = "[picture](bench/pin-vs-reload.png)"
    return f"{next_turn(result)}: `{result['command']}`, {picture}."


#: By the first word of a result's name.
_SECTIONS = {
    "validate": _validate,
    "harness": _harness,
    "demo": _demo,
    "pin": _pin_vs_reload,
}
_COMPARISONS = {"validate": _against_rivals, PREFIX: _by_metric, "demo": _in_pairs}
