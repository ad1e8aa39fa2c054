"""The fleet demo's numbers, table and verdict, without a server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.compare.fleet import report
from bench.compare.fleet.arms import Death, FleetResult
from bench.serve.arms import EngineCounters
from bench.serve.replay import Failure
from tests.bench.samples import served
from ttlcache_sim.metrics import TurnRecord, compare_outputs, summarize

ENGINE = EngineCounters(
    1000, 400, 0, {}, 0, 0, 0.0, 0, {}, {"cpu": 96}, lower_tier_hits=100
)


def record(program: str, turn: int, server: str, cached: int = 90) -> TurnRecord:
    return served(program, turn, 10.0 * turn, cached_tokens=cached, server=server)


#: a stays; b moves once and finds its KV; c moves once and finds nothing.
RECORDS = (
    *(record("a", turn, "replica-0") for turn in range(3)),
    *(record("b", turn, f"replica-{int(turn < 2)}") for turn in range(3)),
    *(
        record("c", turn, f"replica-{int(turn < 1)}", 90 * (turn != 1))
        for turn in (0, 1)
    ),
)


def result(name: str = "session", **changes: object) -> FleetResult:
    made = FleetResult(name, RECORDS, (), (), (), summarize(RECORDS), (ENGINE, ENGINE))
    return replace(made, **changes)


def test_what_a_death_cost():
    facts = report.migration(result(death=Death("replica-1", 12.0)))
    assert facts is not None
    assert facts["moved_programs"] == 2
    assert facts["whole_prefills"] == 1
    assert (facts["found_tokens"], facts["context_tokens"]) == (90, 200)
    assert facts["reloaded_tokens"] == 192
    assert report.migration(result()) is None
    (line,) = report.deaths([result(), result(death=Death("replica-1", 12.0))])
    assert "2 programs moved" in line
    assert "1 were prefilled whole" in line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"failures": (Failure("a", 1, "gone"),)}, "failed requests"),
        ({"log_errors": ("ERROR x",)}, "errors in the replicas' logs"),
        ({"retried": (Failure("a", 1, "500"),)}, "every replica lived"),
        ({"retried": (Failure("a", 1, "500"),), "death": Death("r", 1.0)}, None),
        ({"records": RECORDS[:-1]}, "differ from the first arm's"),
    ],
)
def test_what_ends_the_demo_with_a_problem(changes, said):
    seen = result(**changes)
    found = report.problems(seen, compare_outputs(RECORDS, seen.records))
    assert [said in text for text in found] == ([] if said is None else [True])
