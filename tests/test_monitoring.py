"""The dashboard and the alerts ask for metrics that exist, under labels they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ttlcache.telemetry.metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAM_LABELS,
    HISTOGRAMS,
    HTTP_COUNTERS,
)

FOLDER = Path(__file__).parents[1] / "docs" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text())
ALERTS = (FOLDER / "alerts.yml").read_text()
DASHBOARD_EXPRESSIONS = [
    target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]
]
_ALERT = re.compile(r"expr: (?:>-\n)?(.*?)\n        (?:for|labels):", re.DOTALL)
EXPRESSIONS = [*DASHBOARD_EXPRESSIONS, *_ALERT.findall(ALERTS)]
#: (metric, the whole expression) of alerts on what grows.
INCREASES = [
    (name, " ".join(expression.split()))
    for expression in _ALERT.findall(ALERTS)
    for name in re.findall(r"increase\((ttlcache_\w+)", expression)
]
#: vLLM's own metrics that we rely on; tests/e2e sees them on a real server.
VLLM = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
}
#: Ours in LMCache's server, as tests/e2e/test_lmcache_plugins.py sees it.
LMCACHE = {"lmcache_mp_ttlcache_disk_faults_total": {"kind", "path"}}


def metric_labels() -> dict[str, set[str]]:
    """Every exposed name with the labels of ours that it has."""
    known = {
        f"ttlcache_{name}_total": set(label.split("/")) if label else set()
        for name, (_, label) in COUNTERS.items()
    }
    known |= {f"ttlcache_{name}": set() for name in GAUGES}
    known |= {
        f"{name}_total": set(labels) for name, (_, labels) in HTTP_COUNTERS.items()
    }
    for name in HISTOGRAMS:
        label = HISTOGRAM_LABELS.get(name)
        own = {label} if label else set()
        known[f"ttlcache_{name}_bucket"] = own | {"le"}
        known[f"ttlcache_{name}_sum"] = known[f"ttlcache_{name}_count"] = own
    return known | LMCACHE


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:lmcache_mp_|ttlcache_|vllm:)\w+", expression))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_asks_for_metrics_that_exist(expression):
    known = metric_labels()
    names = names_in(expression)
    assert names
    assert names <= known.keys() | VLLM, names - known.keys()
    asked = set(re.findall(r"\{(\w+)=", expression))
    for group in re.findall(r"by \(([^)]*)\)", expression):
        asked |= {label.strip() for label in group.split(",")}
    ours = [known[name] for name in names if name in known]
    for label in asked - {"instance", "engine"}:  # Prometheus's, and vLLM's on all
        assert any(label in labels for labels in ours), label


def test_every_metric_is_on_the_dashboard():
    shown = set().union(*map(names_in, DASHBOARD_EXPRESSIONS))
    for name in [*COUNTERS, *GAUGES, *HISTOGRAMS]:
        assert any(s.startswith(f"ttlcache_{name}") for s in shown), name
    for name in HTTP_COUNTERS:
        assert f"{name}_total" in shown


def test_the_alerts_are_found_by_this_test():
    assert len(EXPRESSIONS) - len(DASHBOARD_EXPRESSIONS) == ALERTS.count("- alert:")
