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
    parts = []
    alone = _means(result, "adaptive", "programs_per_s")
    session = _means(result, "adaptive @ session", "programs_per_s")
    if alone and session:
        x, fleet = list(session.items())[-1]
        (one,) = alone.values()
        parts.append(
            f"Throughput of {x} under `session` over 64 times one replica's: "
            f"{fleet / (64 * one):.3f} (bar: within 5 %). It is all programs over the "
            "seconds from the first arrival to the last departure, so the end, when "
            "few are left, counts on both sides."
        )
    for x, base_s in _means(result, "adaptive @ cache-aware", "mean_jct_s").items():
        shares = [
            f"`{routing}` {jct_s[x] / base_s:.2f}"
            for routing in ("session", "sticky")
            if x in (jct_s := _means(result, f"adaptive @ {routing}", "mean_jct_s"))
        ]
        parts.append(
            f"Mean JCT of {x} over `cache-aware`'s: {', '.join(shares)} (bar: 1)."
        )
    return " ".join(parts)


def _rollout(result: Json) -> str:
    """Turns a minute over vLLM's and the paper's."""
    turns = {row["arm"]: row["turns_per_min"] for row in result["rows"]}
    ours = turns["adaptive"]
    ratios = ", ".join(
        f"{ours / turns[arm]:.2f}x `{arm}`"
        for arm in ("vllm", "cachettl", "thunderagent")
    )
    return f"Turns a minute of `adaptive`: {ratios} (bars: 1.2x `vllm`, 1x `cachettl`)."


def _means(result: Json, arm: str, key: str) -> dict[str, float]:
    """By x, in its order."""
    values: dict[str, list[float]] = {}
    for row in result["rows"]:
        if row["arm"] == arm:
            values.setdefault(row["x"], []).append(row[key])
    return {x: statistics.fmean(own) for x, own in values.items()}


#: By figure; the rows of these are no rivals at one load.
_NOTES = {"fleet-full": _full, "rollout": _rollout}
NAMES = tuple(_NOTES)
