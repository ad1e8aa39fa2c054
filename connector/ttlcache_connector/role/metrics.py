"""Our numbers on vLLM's own `/metrics`, through the connector's hooks."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ttlcache.programs.divergence import Cause
from ttlcache.telemetry.metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAM_LABELS,
    HISTOGRAMS,
    MAX_OBSERVATIONS,
)
from ttlcache.types import IdentityRule, PinOutcome
from ttlcache_connector.engine import vllm_internals
from ttlcache_connector.log import logger

log = logger(__name__)

_PREFIX = "ttlcache_"
#: Label values that show as 0 before they first happen: few, and what users look for.
#: All others would be hundreds of lines.
_KNOWN_LABELS: dict[str, tuple[str, ...]] = {
    "pins": tuple(PinOutcome),
    "turns_identified": tuple(IdentityRule),
    "turns_diverged": tuple(Cause),
    "programs_ended": ("last_step", "idle", "forgotten", "told"),
}


class TTLConnectorStats(KVConnectorStats):
    """A drained `MetricsBuffer` plus gauges, as plain serialisable data."""

    def reset(self) -> None:
        self.data = {"counters": [], "observations": {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        # vLLM adds up every step's for its log line: one entry per label is enough.
        mine, theirs = self.data, other.data
        sums: dict[tuple[str, str], float] = {}
        for name, label, by in (*mine.get("counters", ()), *theirs.get("counters", ())):
            sums[name, label] = sums.get((name, label), 0) + by
        mine["counters"] = [[name, label, by] for (name, label), by in sums.items()]
        observations = mine.setdefault("observations", {})
        for name, values in theirs.get("observations", {}).items():
            both = [*observations.get(name, ()), *values]
            observations[name] = both[:MAX_OBSERVATIONS]
        mine.setdefault("gauges", {}).update(theirs.get("gauges", {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's periodic log line."""
        totals: dict[str, int | float] = {}
        for name, label, by in self.data.get("counters", ()):
            key = f"ttlcache {name} {label}".strip()
            totals[key] = totals.get(key, 0) + by
        return totals | {
            f"ttlcache {name}": value
            for name, value in self.data.get("gauges", {}).items()
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())


class TTLPromMetrics(KVConnectorPromMetrics):
    """Registers our metrics once per frontend and feeds them from the stats."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._failed = False
        vllm_internals.forget_metrics(
            {_PREFIX + name for name in (*COUNTERS, *GAUGES, *HISTOGRAMS)}
        )
        counter, gauge = metric_types[Counter], metric_types[Gauge]
        histogram = metric_types[Histogram]
        self._counters = {
            name: counter(
                name=_PREFIX + name,
                documentation=text,
                labelnames=[*labelnames, *(label.split("/") if label else [])],
            )
            for name, (text, label) in COUNTERS.items()
        }
        self._gauges = {
            name: gauge(
                name=_PREFIX + name,
                documentation=text,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, text in GAUGES.items()
        }
        self._histograms = {
            name: histogram(
                name=_PREFIX + name,
                documentation=text,
                labelnames=[
                    *labelnames,
                    *([HISTOGRAM_LABELS[name]] if name in HISTOGRAM_LABELS else []),
                ],
                buckets=list(buckets),
            )
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        for values in per_engine_labelvalues.values():
            self._show_zeros(values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Never raises: in vLLM's API server an exception here ends all service."""
        try:
            self._observe(transfer_stats_data, engine_idx)
        except Exception as error:
            if not self._failed:
                self._failed = True
                log.warning(
                    "ttlcache: numbers from engine %d are lost (logged once): %s",
                    engine_idx,
                    error,
                    exc_info=True,
                )

    def _observe(self, transfer_stats_data: dict[str, Any], engine_idx: int) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for name, label, by in transfer_stats_data.get("counters", ()):
            labels = label.split("/") if COUNTERS[name][1] else []
            self._counters[name].labels(*engine, *labels).inc(by)
        for key, values in transfer_stats_data.get("observations", {}).items():
            name, _, label = key.partition("/")
            labels = [label] if label else []
            histogram = self._histograms[name].labels(*engine, *labels)
            for value in values:
                histogram.observe(value)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            self._gauges[name].labels(*engine).set(value)

    def _show_zeros(self, engine: list[object]) -> None:
        for name, (_, label) in COUNTERS.items():
            if label is None:
                self._counters[name].labels(*engine)
            for value in _KNOWN_LABELS.get(name, ()):
                self._counters[name].labels(*engine, str(value))
        for gauge in self._gauges.values():
            gauge.labels(*engine)
