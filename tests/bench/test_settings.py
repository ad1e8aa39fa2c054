"""`bench settings`: what it accepts, and what it says of the rounds."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from bench.compare import report, settings
from bench.compare.agents import CONNECTOR, LMCACHE
from bench.compare.rounds import in_turn


def arm(jct_s, tokens_per_s=100.0):
    summary = SimpleNamespace(
        mean_jct_s=jct_s, p99_turn_s=2 * jct_s, output_tokens_per_s=tokens_per_s
    )
    return SimpleNamespace(summary=summary)


def test_each_round_is_compared_with_its_own_base():
    done = [{"a": arm(10.0), "b": arm(5.0)}, {"a": arm(40.0), "b": arm(80.0)}]
    ratio = report.ratio(done, "mean_jct_s", "b", "a")
    assert ratio.by_round == (0.5, 2.0)
    assert ratio.geometric_mean == pytest.approx(1.0)
    # ln 2 and -ln 2: their standard deviation is sqrt(2) ln 2, of the mean ln 2.
    assert ratio.standard_error == pytest.approx(math.log(2.0))


def test_a_line_tells_the_ratios_of_every_round():
    done = [
        {"a": arm(10.0), "b": arm(9.0, tokens_per_s=80.0)},
        {"a": arm(20.0), "b": arm(18.0, tokens_per_s=80.0)},
    ]
    assert report.lines(done, ["a", "b"]) == [
        "b over a: mean JCT 0.900 ± 0.000 (0.90, 0.90), tokens a second 0.800 ± 0.000 "
        "(0.80, 0.80), turn p99 0.900 ± 0.000 (0.90, 0.90)"
    ]
    # A single round has no error.
    assert report.lines(done[:1], ["a", "b"]) == [
        "b over a: mean JCT 0.90x, tokens a second 0.80x, turn p99 0.90x"
    ]


def test_the_order_turns_around():
    played = [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert list(in_turn(["a", "b"], 3)) == played


def test_arms_are_connectors_with_their_settings():
    config = "kv_connector_extra_config"
    below = 'lmcache:{"lmcache.mp.save_decode_cache": true}'
    chosen = settings.parse(["vanilla", '{"admission": "none"}', "lmcache", below])
    assert chosen == {
        "vanilla": None,
        '{"admission": "none"}': {**CONNECTOR, config: {"admission": "none"}},
        "lmcache": {**LMCACHE, config: {}},
        below: {**LMCACHE, config: {"lmcache.mp.save_decode_cache": True}},
    }


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["{}"], "at least twice"),
        (["{}", "{}"], "given twice"),
        (["{}", "{"], "not JSON"),
        (["{}", "[]"], "expected a JSON object"),
        (["{}", "lmcache:[]"], "expected a JSON object"),
    ],
)
def test_other_settings_are_refused(texts, told):
    with pytest.raises(ValueError, match=told):
        settings.parse(texts)


