"""The section of what was measured on real servers with a lower tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.report.figures.text import table

Json = Mapping[str, Any]

#: Where a context is, as the result names it, and its column in the table.
WAYS = {
    "claimed": "in GPU memory",
    "cpu": "from CPU",
    "disk": "from disk",
    "prefill": "prefill",
}


def pin_vs_reload(result: Json) -> str:
    """Seconds of the next turn by where its KV is, and the policies' TTLs."""
    rows = result["recoveries"]
    seconds = [
        [
            f"{row['context_tokens']:,}",
            f"{row['kv_bytes'] / 1e6:.1f}",
            *(f"{row[f'{way}_s']:.3f}" for way in WAYS),
        ]
        for row in rows
    ]
    header = ["context, tokens", "KV, MB", *(f"{name}, s" for name in WAYS.values())]
    lengths = [f"{row['context_tokens']:,}" for row in rows]
    ttls = [
        [f"`{name}`", *(f"{none:.2f} / {cpu:.2f}" for none, cpu in pairs)]
        for name, pairs in result["policy_ttls_s"].items()
    ]
    intro = (
        "On vLLM's CPU build with the demo's tiny model, above a real LMCache server, "
        f"{result['machine']}: `{result['command']}`. "
        "Seconds of a program's next turn by where its context is."
    )
    return (
        f"## Hold, reload or prefill\n\n{intro}\n\n"
        f"![pin-vs-reload](bench/pin-vs-reload.png)\n\n{table(header, seconds)}\n"
        "\nTTL that each policy gives a turn of that length in the same "
        "setting, seconds: without a lower tier / with CPU memory below, to which it "
        "has not been copied yet (`demote: on-pressure`).\n\n"
        f"{table(['policy', *lengths], ttls)}\n"
    )


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
