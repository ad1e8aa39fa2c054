"""What the numbers of fleets and rollouts say of their bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def notes(name: str, result: Json) -> list[str]:
    """Sentences below the tables; none for other figures."""
    found = _NOTES.get(name)
    return [found(result)] if found else []


def _full(result: Json) -> str:
    """Throughput against 64 engines alone, JCT against cache-aware routing."""
    alone = 64 * _mean(result, "adaptive", "programs_per_s")
    session = _mean(result, "adaptive @ session", "programs_per_s")
    jct_s = {
        routing: _mean(result, f"adaptive @ {routing}", "mean_jct_s")
        for routing in ("session", "sticky", "cache-aware")
    }
    shares = ", ".join(
        f"{routing} {value / jct_s['cache-aware']:.2f}"
        for routing, value in jct_s.items()
        if routing != "cache-aware"
    )
    return (
        f"Programs a second over 64 times one replica's: {session / alone:.3f} "
        "(bar: within 5 %). Programs a second are all programs over the seconds from "
        "the first arrival to the last departure, so the last programs, which run "
        "alone, count against both sides. "
        f"Mean JCT over cache-aware's: {shares} (bar: at most 1)."
    )


def _rollout(result: Json) -> str:
    """Turns a minute over vLLM's and the paper's."""
    turns = {row["arm"]: row["turns_per_min"] for row in result["rows"]}
    ours = turns["adaptive"]
    ratios = ", ".join(
        f"{ours / turns[arm]:.2f}x `{arm}`"
        for arm in ("vllm", "cachettl", "thunderagent")
    )
    return f"Turns a minute of `adaptive`: {ratios} (bars: 1.2x `vllm`, 1x `cachettl`)."


def _mean(result: Json, arm: str, key: str) -> float:
    return statistics.fmean(row[key] for row in result["rows"] if row["arm"] == arm)


_NOTES = {"fleet-full": _full, "rollout": _rollout}
#: Figures whose rows are no rivals at one load.
NAMES = ("fleet", "fleet-failure", "fleet-full", "rollout")
