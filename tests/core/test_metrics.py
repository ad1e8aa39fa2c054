import json

from ttlcache.telemetry import metrics as declared
from ttlcache.telemetry.metrics import MAX_OBSERVATIONS, MetricsBuffer


def test_counts_and_observations_by_label_drain_to_nothing_but_totals():
    metrics = MetricsBuffer()
    assert metrics.is_empty()
    metrics.count("pins", "claimed")
    metrics.count("pins", "claimed", by=2)
    metrics.count("pins_started")
    metrics.observe("wait_seconds", 1.0, "new")
    metrics.observe("wait_seconds", 2.0, "claimed")
    assert not metrics.is_empty()

    drained = metrics.drain()
    expected = {
        "counters": [["pins", "claimed", 3], ["pins_started", "", 1]],
        "observations": {"wait_seconds/new": [1.0], "wait_seconds/claimed": [2.0]},
    }
    assert drained == json.loads(json.dumps(drained)) == expected
    assert metrics.is_empty()
    assert metrics.drain() == {"counters": [], "observations": {}}
    metrics.observe("wait_seconds", 3.0, "new")
    assert not metrics.is_empty()
    metrics.count("pins_started", by=2)
    assert metrics.totals["pins_started", ""] == 3
    assert drained == expected


def test_memory_is_bounded_when_nobody_drains():
    metrics = MetricsBuffer()
    for value in range(MAX_OBSERVATIONS + 10):
        metrics.observe("gap_seconds", float(value))
    assert len(metrics.observations["gap_seconds"]) == MAX_OBSERVATIONS


def test_every_metric_is_documented_and_named_once():
    names = [*declared.COUNTERS, *declared.GAUGES, *declared.HISTOGRAMS]
    assert len(names) == len(set(names))
    assert set(declared.HISTOGRAM_LABELS) <= set(declared.HISTOGRAMS)
    assert all(text for text, _ in declared.COUNTERS.values())
    assert all(declared.GAUGES.values())
    for text, buckets in declared.HISTOGRAMS.values():
        assert text
        assert list(buckets) == sorted(set(buckets))
