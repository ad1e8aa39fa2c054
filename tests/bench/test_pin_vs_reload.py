from __future__ import annotations

import csv
from dataclasses import asdict, replace

import pytest

from bench.compare.pin_vs_reload import (
    Recovery,
    plot,
    policy_ttls,
    price_of,
    priced,
    seconds_table,
    ttl_table,
    write_csv,
)
from bench.compare.pin_vs_reload_client import TRIES, Client
from bench.report.figures import tiers
from ttlcache import policies
from ttlcache.types import Pressure

FOUND = [
    Recovery(n, 4096 * n, 0.1, 0.1 + n * 1e-5, 0.1 + n * 3e-5, 0.1 + n * 1e-3)
    for n in (1024, 4096, 16384)
]


def test_break_even_gaps_follow_from_the_price_of_memory():
    r = priced(FOUND[1], 2.0 / FOUND[1].kv_bytes)
    assert r.hold_cost == pytest.approx(2.0)
    assert r.cpu_gap_s == pytest.approx(0.04096 / 2)
    assert r.disk_gap_s == pytest.approx(3 * r.cpu_gap_s)
    assert r.prefill_gap_s == pytest.approx(100 * r.cpu_gap_s)


@pytest.mark.parametrize(
    ("pairs", "price"),
    [
        ([3.0, 1.0, 2.0], 2.0),
        ([3.0, -0.1, 2.0], None),  # chance was larger
        ([3.0, 0.0, 2.0], None),
        ([], None),
    ],
)
def test_pairs_that_do_not_agree_tell_no_price(pairs, price):
    assert price_of(pairs) == price


def test_a_cheap_reload_shortens_the_policies_own_ttls():
    pressure = Pressure(pool_blocks=640, num_running=1, num_waiting=2)
    ttls = policy_ttls(FOUND, [0.5, 1.0, 2.0, 5.0] * 60, pressure)
    assert set(ttls) == set(policies.SHIPPED)
    for without, with_cpu in ttls["ski-rental"]:
        assert with_cpu < without
    assert ttls["none"] == [(0.0, 0.0)] * 3


def test_without_a_tier_its_reloads_are_nobodys_business():
    pressure = Pressure(pool_blocks=640, num_running=1, num_waiting=2)
    gaps_s = [0.5, 1.0, 2.0, 5.0] * 60
    slow = [replace(r, cpu_s=0.9 * r.prefill_s) for r in FOUND]
    fast, slower = (policy_ttls(found, gaps_s, pressure) for found in (FOUND, slow))
    for name in policies.SHIPPED:
        assert [t for t, _ in fast[name]] == [t for t, _ in slower[name]], name
    assert fast["infercept"] != slower["infercept"]


class Asked(Client):
    """Answers from a list; every entry is what one turn found."""

    def __init__(self, turns):
        self.turns, self._programs, self._vocab = turns, 0, 100
        self.counts = {"claimed": 0.0, "cpu": 0.0, "disk": 0.0}
        self.first = False

    def _bring(self, way):
        pass

    def _poke(self):
        pass

    def _sources(self):
        return dict(self.counts)

    def _ask(self, prompt, hints):
        self.first = not self.first
        if self.first:
            return 0
        source, cached = self.turns.pop(0)
        if source:
            self.counts[source] += 1
        return cached


def test_a_turn_served_from_elsewhere_is_not_counted():
    """A reset that vLLM refused leaves the context in GPU memory, for example."""
    client = Asked([("claimed", 96), ("cpu", 96), ("disk", 96), ("", 0)])
    assert client.time_next_turn(96, "disk") >= 0
    assert client.turns == [("", 0)]
    assert client.time_next_turn(96, "prefill") >= 0
    client = Asked([("cpu", 96)] * TRIES)
    with pytest.raises(RuntimeError, match="do not come by way of 'prefill'"):
        client.time_next_turn(96, "prefill")


def test_table_csv_and_plot_hold_every_length(tmp_path):
    found = [priced(r, 1e-7) for r in FOUND]
    assert seconds_table(found).row_count == 3
    ttls = policy_ttls(found, [1.0] * 200, Pressure(pool_blocks=640))
    assert ttl_table(found, ttls).row_count == len(ttls)
    write_csv(found, tmp_path / "r.csv")
    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["context_tokens"]) for row in rows] == [1024, 4096, 16384]
    assert plot(found, tmp_path / "p.png").stat().st_size > 1000
    # Without a price: seconds alone.
    assert plot(FOUND, tmp_path / "free.png").stat().st_size > 1000
    assert seconds_table(FOUND).row_count == 3
    page = {way: tiers.pin_vs_reload(_result(found, way)) for way in (True, False)}
    assert "Gap:" in page[True]
    assert "gap, disk, s" in page[True]
    assert "not told" in page[False]
    assert "gap, disk, s" not in page[False]
    assert "-1.00, 2.00, 3.00" in page[False]


def _result(found, is_priced):
    pairs = [3.0, 1.0 if is_priced else -1.0, 2.0]
    return {
        "recoveries": [asdict(r) for r in (found if is_priced else FOUND)],
        "hold_pairs_job_seconds_per_byte_second": pairs,
        "policy_ttls_s": {},
        "held_tokens": 1024,
        "held_bytes": 1,
        "pool_tokens": 8192,
        "rate": 1.0,
        "programs": 8,
        "machine": "2 cores",
        "command": "python",
    }
