"""What clients tell LMCache itself, made harmless.

LMCache reads `lmcache.*` of a request's `kv_transfer_params` as it is. A bound that is
no number raises in every step of that request, and what cannot be sent in every lookup:
one client would turn the tier off for all.
"""

from __future__ import annotations

import math
from typing import Any

from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker

MAX_WISHES = 16
MAX_CHARS = 256
_MAX_INT = 2**63 - 1


def heed_wishes(tracker: LMCacheMPRequestTracker) -> None:
    """Of a new tracker: keep plain, short values and a bound that is a number."""
    wishes = tracker.request_configs
    if wishes is not None:
        sane = {k: v for k, v in wishes.items() if _is_sane(k) and _is_sane(v)}
        tracker.request_configs = sane if 0 < len(sane) <= MAX_WISHES else None
    bound = tracker.max_offload_tokens
    if type(bound) is not int or not _is_sane(bound):
        tracker.max_offload_tokens = None


def _is_sane(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_CHARS and value.isascii()
    if isinstance(value, int):  # a bool, too
        return abs(value) <= _MAX_INT
    return isinstance(value, float) and math.isfinite(value)
