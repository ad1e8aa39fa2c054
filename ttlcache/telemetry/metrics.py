"""Counters, gauges and observations as plain data, drained by the adapter.

The core counts; the adapter carries the numbers to wherever the engine exposes
metrics. Label values come from fixed sets only, never from clients. Where a metric
has two labels its values are written "first/second".
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

#: Observations kept between two drains; more are dropped.
MAX_OBSERVATIONS = 4096

#: Metric name -> (help, label names as "first/second", or None). All counters.
COUNTERS: dict[str, tuple[str, str | None]] = {
    "pins": ("Pins that ended, by outcome.", "outcome"),
    "pins_by_tool": (
        "Pins that ended, by class of the tool they waited for and outcome.",
        "tool_class/outcome",
    ),
    "pins_started": ("Pins started.", None),
    "claimed_tokens": ("Prompt tokens served from a claimed pin.", None),
    "prefill_tokens_saved": (
        "Of those, estimated: what plain vLLM's prefix cache would have evicted.",
        None,
    ),
    "prefill_seconds_saved": ("Seconds of prefill that pins saved, estimated.", None),
    "prefill_tokens_savable": (
        "Under policy observe: prompt tokens that pins would have saved, at most.",
        None,
    ),
    "prefill_seconds_savable": (
        "Under policy observe: seconds of prefill that pins would have saved, at most.",
        None,
    ),
    "turns_identified": ("Requests by the rule that found their program.", "rule"),
    "turns_diverged": (
        "Turns whose prompt did not begin with their program's last context, by where "
        "it differs: head, middle, output, shortened.",
        "cause",
    ),
    "programs_started": ("Programs seen for the first time.", None),
    "programs_ended": ("Programs that ended: last_step, told, idle, forgotten.", "how"),
    "hints_rejected": ("Requests with hints that were left out, by reason.", "reason"),
    "hook_errors": ("Exceptions caught in our hooks, by hook.", "hook"),
    "evicted_returns": (
        "Turns that came back and found their KV gone from GPU memory.",
        None,
    ),
    "reloads": ("Prompts of which a part came back from a lower tier.", "tier"),
    "reloaded_tokens": ("Prompt tokens that came back from a lower tier.", "tier"),
    "failed_reloads": ("Reloads that failed; the tokens were prefilled.", None),
    "demotions": ("Turns sent to the lower tier: stored, failed, dropped.", "outcome"),
    "tier_bytes": ("KV bytes copied between GPU and lower tier.", "direction"),
    "tier_outages": ("Times the lower tier stopped answering.", None),
    "quanta_used_up": ("Quanta of service after which a program lost its place.", None),
    "overdue_requests": ("Requests served early because they waited too long.", None),
}
GAUGES: dict[str, str] = {
    "pins_active": "Pins alive.",
    "pinned_blocks": "KV blocks referenced by pins, shared ones counted once.",
    "free_blocks": "KV blocks that are free, or held only by cached turns.",
    "pool_blocks": "KV blocks of the pool without the null block.",
    "programs_active": "Programs in the table.",
    "waiting_programs": "Programs of which a request waits for its memory.",
    "growth_blocks": (
        "KV blocks that programs under way are expected to need still: a new program "
        "leaves them free, half of the pool at most."
    ),
    "lower_tier_kept_share": (
        "Of tokens lost to the lower tier that turns came back to, the share of which "
        "it had most of the context."
    ),
    "queueing_delay_seconds": "T: mean queueing delay of returns whose KV was gone.",
    "memoryfulness": "Eta: how much progress tells about remaining turns.",
    "seniority_quantum_seconds": (
        "Service for which a context keeps its place in the queue."
    ),
    "demoting_blocks": "KV blocks of ended pins that wait for their copy.",
    "lingering_blocks": "KV blocks of turns past their time, not needed yet.",
    "leaked_blocks": "KV blocks referenced by no request and no pin; 0 in health.",
    "tier_up": "1 while the lower tier answers, 0 while it does not or none is set.",
    "tier_used_bytes": "Bytes of the CPU tier that stored turns and copies hold.",
    "tier_budget_bytes": "Bytes that it may hold: cpu_gb in whole blocks.",
    "retention_enabled": "1 while pins are made, 0 after ttlcache turned itself off.",
    "recorder_dropped_events": "Events that the recorder had to drop.",
}
#: Full name -> (help, label names): counted by the API server, not by an engine.
HTTP_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ttlcache_http_requests": (
        "Generating HTTP requests by where their program's id was found.",
        ("rule",),
    ),
    "ttlcache_http_values_dropped": (
        "Values of HTTP requests that were not used, by reason.",
        ("reason",),
    ),
    "ttlcache_http_errors": ("Exceptions caught in our HTTP middleware.", ()),
}
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
#: Metric name -> (help, upper bounds of the buckets in seconds).
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "ttl_seconds": ("TTL of each decision, 0 for no pin.", _SECONDS),
    "gap_seconds": ("Seconds between a turn's end and the next turn.", _SECONDS),
    "pinned_seconds": ("Seconds that each pin lived.", _SECONDS),
    "tool_gap_seconds": ("gap_seconds by class of the tool that ran.", _SECONDS),
    "wait_seconds": ("Seconds in the waiting queue, by kind of turn.", _SECONDS),
    "reload_seconds": ("Seconds of each reload from a lower tier.", _SECONDS),
    "decide_seconds": (
        "Our own time per finished turn: tool detection and decision.",
        (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1),
    ),
}


#: Label of those histograms that have one.
HISTOGRAM_LABELS = {"tool_gap_seconds": "tool_class", "wait_seconds": "turn"}


@dataclass(slots=True)
class MetricsBuffer:
    """What happened since the last drain, and in all (`totals`)."""

    totals: defaultdict[tuple[str, str], float] = field(
        default_factory=lambda: defaultdict(int)
    )
    observations: dict[str, list[float]] = field(default_factory=dict)
    _drained: dict[tuple[str, str], float] = field(default_factory=dict)
    _has_counted: bool = False

    def count(self, name: str, label: str = "", by: float = 1) -> None:
        self.totals[name, label] += by
        self._has_counted = True

    def observe(self, name: str, value: float, label: str = "") -> None:
        key = f"{name}/{label}" if label else name
        values = self.observations.get(key)
        if values is None:
            values = self.observations[key] = []
        if len(values) < MAX_OBSERVATIONS:
            values.append(value)

    def is_empty(self) -> bool:
        return not self._has_counted and not self.observations

    def drain(self) -> dict[str, Any]:
        """A serialisable snapshot; the buffer starts again from zero.

        Returns:
            {"counters": [[name, label, n], …], "observations": {name: [value, …]}}
            with "name/label" for the names of labelled observations.
        """
        drained = self._drained
        counters = []
        for key, total in self.totals.items():
            count = total - drained.get(key, 0)
            if count > 0:
                drained[key] = total
                counters.append([*key, count])
        data = {"counters": counters, "observations": self.observations}
        self._has_counted = False
        self.observations = {}
        return data
