"""Sections and figures of what was measured on real servers with a lower tier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.figures.text import table

Json = Mapping[str, Any]

#: Ways back of a context, and the column of the table.
_WAYS = {"cpu": "CPU", "disk": "disk", "prefill": "prefill"}


def pin_vs_reload(result: Json) -> str:
    """Seconds of the next turn by where its KV is, and when holding it pays."""
    rows = result["recoveries"]
    is_priced = result.get("held_throughout", False)
    seconds = [
        [
            f"{row['context_tokens']:,}",
            f"{row['kv_bytes'] / 1e6:.1f}",
            *(f"{row[f'{way}_s']:.3f}" for way in ("claimed", *_WAYS)),
            *(_price(row) if is_priced else ()),
        ]
        for row in rows
    ]
    header = ["context, tokens", "KV, MB", "in GPU memory, s"]
    header += ["from CPU, s", "from disk, s", "prefill, s"]
    if is_priced:
        header += ["hold, s/s", *(f"gap, {name}, s" for name in _WAYS.values())]
    lengths = [f"{row['context_tokens']:,}" for row in rows]
    ttls = [
        [f"`{name}`", *(f"{none:.2f} / {cpu:.2f}" for none, cpu in pairs)]
        for name, pairs in result["policy_ttls_s"].items()
    ]
    intro = (
        "On vLLM's CPU build with the demo's tiny model, above a real LMCache server, "
        f"{result['machine']}: `{result['command']}`. "
        "Seconds of a program's next turn by where its context is. "
    )
    intro += _of_price(result) if is_priced else _UNPRICED
    page = (
        f"## Hold, reload or prefill\n\n{intro}\n\n"
        f"![pin-vs-reload](bench/pin-vs-reload.png)\n\n{table(header, seconds)}\n"
    )
    if not is_priced:
        return page
    return (
        f"{page}\nTTL that each policy gives a turn of that length in the same "
        "setting, seconds: without a lower tier / with CPU memory below, to which it "
        "has not been copied yet (`demote: expiry`).\n\n"
        f"{table(['policy', *lengths], ttls)}\n"
    )


_UNPRICED = (
    "What holding costs others, and the policies' TTLs, are not told here: when this "
    "was measured the context was given up as soon as somebody waited. The bench "
    "checks that now."
)


def _of_price(result: Json) -> str:
    text = (
        "Hold: job seconds that others lose for each second that it stays, from "
        f"{result['rounds']} pairs of replays of {result['programs']} programs, "
        f"{result['rate']:g} a second, with and without {result['held_tokens']:,} of "
        f"{result['pool_tokens']:,} tokens held. Gap: the tool call for which holding "
        "costs others as much as the way back costs the program; for shorter ones "
        "holding pays."
    )
    if not result["job_seconds_per_byte_second"]:
        text += (
            " These pairs showed no cost of holding above their noise, so no gap is "
            "too long."
        )
    return text


def _price(row: Json) -> list[str]:
    gaps = [_seconds(row[f"{way}_gap_s"]) for way in _WAYS]
    return [f"{row['hold_cost']:.3f}", *gaps]


def summary(result: Json) -> str:
    """One sentence for README: the longest context."""
    row = result["recoveries"][-1]
    return (
        "Measured on vLLM's CPU build with a tiny model above a real LMCache server: "
        f"the next turn of a {row['context_tokens']:,}-token context takes "
        f"{row['prefill_s']:.1f} s with a prefill, {row['cpu_s']:.2f} s from CPU "
        f"memory, {row['disk_s']:.2f} s from disk, {row['claimed_s']:.2f} s from a "
        f"pin ({result['machine']})."
    )


def draw_pin_vs_reload(result: Json, folder: Path) -> None:
    """`pin-vs-reload.png` and `.csv`: the bench's own."""
    from bench.pin_vs_reload import Recovery, plot, write_csv

    found = [Recovery(**row) for row in result["recoveries"]]
    write_csv(found, folder / "pin-vs-reload.csv")
    plot(found, folder / "pin-vs-reload.png")


def _seconds(value: float) -> str:
    return "any" if value == float("inf") else f"{value:.2f}"
