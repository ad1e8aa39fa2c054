"""Sections and figures of what was measured on real servers with a lower tier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.report.figures.text import table

Json = Mapping[str, Any]

#: Ways back of a context, and the column of the table.
_WAYS = {"cpu": "CPU", "disk": "disk", "prefill": "prefill"}


def pin_vs_reload(result: Json) -> str:
    """Seconds of the next turn by where its KV is, and when holding it pays."""
    rows = result["recoveries"]
    is_priced = rows[0]["hold_cost"] is not None
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
    intro += _of_price(result, is_priced)
    return (
        f"## Hold, reload or prefill\n\n{intro}\n\n"
        f"![pin-vs-reload](bench/pin-vs-reload.png)\n\n{table(header, seconds)}\n"
        "\nTTL that each policy gives a turn of that length in the same "
        "setting, seconds: without a lower tier / with CPU memory below, to which it "
        "has not been copied yet (`demote: on-pressure`).\n\n"
        f"{table(['policy', *lengths], ttls)}\n"
    )


def _of_price(result: Json, is_priced: bool) -> str:
    pairs = [
        cost * result["held_bytes"]
        for cost in result["hold_pairs_job_seconds_per_byte_second"]
    ]
    found = ", ".join(f"{pair:.2f}" for pair in sorted(pairs))
    text = (
        "Job seconds that others lose for each second that a context of "
        f"{result['held_tokens']:,} tokens (of {result['pool_tokens']:,}) stays, from "
        f"{len(pairs)} pairs of replays of {result['programs']} programs, "
        f"{result['rate']:g} a second, with and without it: {found}. "
    )
    if not is_priced:
        return text + (
            "They do not agree that holding costs anything, so what it costs, and up "
            "to which tool call it pays, is not told."
        )
    return text + (
        "Hold: their median, in proportion to the tokens. Gap: the tool call for which "
        "holding costs others as much as the way back costs the program; for shorter "
        "ones holding pays."
    )


def _price(row: Json) -> list[str]:
    gaps = [f"{row[f'{way}_gap_s']:.2f}" for way in _WAYS]
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
    from bench.compare.pin_vs_reload import Recovery, plot, write_csv

    found = [Recovery(**row) for row in result["recoveries"]]
    write_csv(found, folder / "pin-vs-reload.csv")
    plot(found, folder / "pin-vs-reload.png")
