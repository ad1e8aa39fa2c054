"""Our numbers in LMCache's own metrics: the OpenTelemetry provider that it set up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from opentelemetry import metrics

from ttlcache_lmcache.retention.l1_tier import Tier

#: Counters by the key of `Tier.counts`.
COUNTERS = {
    "turns_continued": "Turns recognised as going on with a program.",
    "programs_finished": "Programs that a client called finished.",
    "expired": "Programs whose TTL ran out.",
    "evicted": "Objects that left L1 in our order.",
    "refused": "Objects that L1 did not take: worth less than what it has.",
    "hints": "Hints that came in over the RPC.",
    "forgotten": "Programs forgotten because they were silent.",
}
_PREFIX = "lmcache_mp.ttlcache_"


def export(tier: Tier, errors: Mapping[str, int]) -> None:
    """Register them; read whenever LMCache's metrics are."""
    meter = metrics.get_meter("ttlcache")

    def told(key: str) -> list[Any]:
        return [lambda _options: [metrics.Observation(tier.counts[key])]]

    for key, text in COUNTERS.items():
        read = told(key)
        meter.create_observable_counter(_PREFIX + key, read, description=text)
    text = "Exceptions in our hooks."
    _export_by_label("ttlcache", "hook_errors", "hook", text, lambda: dict(errors))


def export_faults(path: str, read: Callable[[], Mapping[str, int]]) -> None:
    """Register what the disk tier at `path` did wrong, by kind."""
    text = "Objects that a disk tier did not give back or keep."
    # A meter of its own: of one name in one meter there is one instrument.
    where = {"path": path}
    _export_by_label(f"ttlcache {path}", "disk_faults", "kind", text, read, where)


def _export_by_label(
    meter_name: str,
    name: str,
    label: str,
    text: str,
    read: Callable[[], Mapping[str, int]],
    more: Mapping[str, str] = MappingProxyType({}),
) -> None:
    def observe(_options: Any) -> Iterable[metrics.Observation]:
        found = read().items()
        return [metrics.Observation(n, {label: key, **more}) for key, n in found]

    meter = metrics.get_meter(meter_name)
    meter.create_observable_counter(_PREFIX + name, [observe], description=text)
