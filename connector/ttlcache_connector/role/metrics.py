"""Our numbers on vLLM's own `/metrics`, through the connector's hooks."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ttlcache.programs.divergence import Cause
from ttlcache.programs.hints import REJECTIONS
from ttlcache.telemetry.metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAM_LABELS,
    HISTOGRAMS,
    MAX_OBSERVATIONS,
    WAIT_KINDS,
)
from ttlcache.toolcalls.classes import TOOL_CLASSES
from ttlcache.types import IdentityRule, PinOutcome
from ttlcache_connector.engine import hooks
from ttlcache_connector.log import logger

log = logger(__name__)

_PREFIX = "ttlcache_"
#: Label values known in advance: they show as 0 before they first happen. Prometheus's
#: `increase`, and so our alerts, sees no step to 1 in a series that begins with it.
_KNOWN_LABELS: dict[str, tuple[str, ...]] = {
    "pins": tuple(PinOutcome),
    "pins_by_tool": tuple(
        f"{tool}/{outcome}" for tool in TOOL_CLASSES for outcome in PinOutcome
    ),
    "tool_gap_seconds": TOOL_CLASSES,
    "wait_seconds": WAIT_KINDS,
    "turns_identified": tuple(IdentityRule),
    "turns_diverged": tuple(Cause),
    "programs_ended": ("last_step", "idle", "forgotten", "told"),
    "hook_errors": (
        *("arrive", "priority", "admission", "urgency"),
        *("note_local_hit", "on_allocated", "note_aged", "finished", "before_step"),
        *("step_scheduled", "step_done"),
        *("eviction", "missing_blocks", "release_pins", "drop_rest", "foreign_step"),
        *("take_stats", "policy", "slow", "invariants", "shutdown"),
        *("control", "load_started", "worker_output", "requeue_if_moved"),
        *("put_back_failed_loads", "stored_tokens", "start_copies_ahead"),
        *("release_if_off", "drop_orphans"),
        # Of the lower tier, in the scheduler's process and in the workers'.
        *("is_up", "tier_looked_up", "tier_events"),
        *("tier_on_handshake", "tier_arrive", "tier_match", "tier_allocated"),
        *("tier_build_metadata", "tier_worker_output", "tier_take_events"),
        *("tier_finished", "tier_report_turn"),
        *("tier_has_work", "tier_abandon", "tier_fill", "tier_reset", "tier_shutdown"),
        *("worker_before_forward", "worker_load", "worker_save", "worker__poll"),
        *("worker_report", "worker_take_stats", "worker_shutdown"),
    ),
    "reloads": ("cpu", "disk", "unknown"),
    "reloaded_tokens": ("cpu", "disk", "unknown"),
    "tier_bytes": ("demoted", "promoted"),
    "tier_mover_bytes": ("reference", "cupy", "lmcache"),
    "demotions": ("stored", "failed", "dropped"),
    "hints_rejected": REJECTIONS,
}


class TTLConnectorStats(KVConnectorStats):
    """A drained `MetricsBuffer` plus gauges, as plain serialisable data."""

    def reset(self) -> None:
        self.data = {"counters": [], "observations": {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        # vLLM adds up every step's for its log line: one entry per label is enough.
        mine, theirs = self.data, other.data
        sums: dict[tuple[str, str], int] = {}
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
        hooks.forget_metrics(
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
                self._counters[name].labels(*engine, *str(value).split("/"))
        for name in HISTOGRAM_LABELS:
            for value in _KNOWN_LABELS[name]:
                self._histograms[name].labels(*engine, value)
        for gauge in self._gauges.values():
            gauge.labels(*engine)
