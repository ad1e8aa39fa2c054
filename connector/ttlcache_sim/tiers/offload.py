"""`--offload`: what lies below the GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TIER = re.compile(r"(cpu|ssd):(\d+(?:\.\d+)?)")
GB = 1e9


@dataclass(frozen=True, slots=True)
class Offload:
    """Capacities in bytes; 0 for a tier that is not there."""

    cpu_bytes: float = 0.0
    ssd_bytes: float = 0.0

    def __bool__(self) -> bool:
        return self.cpu_bytes > 0


def parse_offload(text: str) -> Offload:
    """From "none", "cpu:GB" or "cpu:GB+ssd:GB" (GB = 1e9 bytes).

    Raises:
        ValueError: anything else.
    """
    if text == "none":
        return Offload()
    found = [_TIER.fullmatch(part) for part in text.split("+")]
    names = [m and m[1] for m in found]
    if names not in (["cpu"], ["cpu", "ssd"]):
        raise ValueError(f"offload {text!r}: expected none, cpu:GB or cpu:GB+ssd:GB")
    sizes = {m[1]: float(m[2]) * GB for m in found if m is not None}
    if not all(sizes.values()):
        raise ValueError(f"offload {text!r}: a tier of 0 GB is no tier")
    return Offload(sizes["cpu"], sizes.get("ssd", 0.0))
