"""Waiting for what happens in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable


def becomes(condition: Callable[[], object], patience_s: float) -> bool:
    """Whether it came true in time; asked twenty times a second."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False
