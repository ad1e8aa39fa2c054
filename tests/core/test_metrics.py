from __future__ import annotations

import json

from ttlcache.telemetry.metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAM_LABELS,
    HISTOGRAMS,
    MAX_OBSERVATIONS,
    MetricsBuffer,
)


def test_counts_by_label_and_drains_to_zero():
    metrics = MetricsBuffer()
    assert metrics.is_empty()
    metrics.count("pins", "claimed")
    metrics.count("pins", "claimed", by=2)
    metrics.count("pins_started")
    assert not metrics.is_empty()

    drained = metrics.drain()
    assert drained == {
        "counters": [["pins", "claimed", 3], ["pins_started", "", 1]],
        "observations": {},
    }
    assert json.loads(json.dumps(drained)) == drained
    assert metrics.is_empty()
    assert metrics.drain() == {"counters": [], "observations": {}}


def test_a_drained_snapshot_does_not_change_later_and_totals_outlive_it():
    metrics = MetricsBuffer()
    metrics.count("pins_started")
    metrics.drain()
    metrics.count("pins_started", by=2)
    assert metrics.totals["pins_started", ""] == 3
    metrics.drain()
    metrics.observe("gap_seconds", 1.0)
    assert not metrics.is_empty()
    snapshot = metrics.drain()
    metrics.observe("gap_seconds", 2.0)
    assert snapshot["observations"] == {"gap_seconds": [1.0]}


def test_memory_is_bounded_when_nobody_drains():
    metrics = MetricsBuffer()
    for value in range(MAX_OBSERVATIONS + 10):
        metrics.observe("gap_seconds", float(value))
    assert len(metrics.observations["gap_seconds"]) == MAX_OBSERVATIONS


def test_every_metric_is_documented_and_named_once():
    names = [*COUNTERS, *GAUGES, *HISTOGRAMS]
    assert len(names) == len(set(names))
    assert all(text for text, _ in COUNTERS.values())
    assert all(GAUGES.values())
    for text, buckets in HISTOGRAMS.values():
        assert text
        assert list(buckets) == sorted(set(buckets))


def test_labelled_observations_keep_apart():
    metrics = MetricsBuffer()
    metrics.observe("wait_seconds", 1.0, "new")
    metrics.observe("wait_seconds", 2.0, "claimed")
    assert metrics.drain()["observations"] == {
        "wait_seconds/new": [1.0],
        "wait_seconds/claimed": [2.0],
    }


def test_labels_are_declared_for_metrics_that_exist():
    assert set(HISTOGRAM_LABELS) <= set(HISTOGRAMS)
