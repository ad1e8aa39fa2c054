"""`bench settings`: what it accepts, and what its table says of the rounds."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.compare import above_tier, settings
from bench.compare.demo import CONNECTOR, LMCACHE
from bench.compare.rounds import in_turn
from bench.ratios import Ratio


def arm(jct_s, prompt_hit=0.5, tokens_per_s=100.0):
    return SimpleNamespace(
        summary=SimpleNamespace(
            mean_jct_s=jct_s,
            p99_turn_s=2 * jct_s,
            output_tokens_per_s=tokens_per_s,
            prompt_hit=prompt_hit,
            mean_running=3.0,
            mean_wait_s=0.25,
        ),
        engine=SimpleNamespace(steps=7.0, step_tokens=90.0, lower_tier_hits=64.0),
    )


def test_each_round_is_compared_with_its_own_base():
    done = [{"a": arm(10.0), "b": arm(5.0)}, {"a": arm(40.0), "b": arm(80.0)}]
    (ratio,) = settings.ratios(done, ["a", "b"], "mean_jct_s").values()
    assert ratio.by_round == (0.5, 2.0)
    assert ratio.geometric_mean == pytest.approx(1.0)
    # ln 2 and -ln 2: their standard deviation is sqrt(2) ln 2, of the mean ln 2.
    assert ratio.standard_error == pytest.approx(math.log(2.0))


def test_one_round_has_no_error():
    assert math.isnan(Ratio((0.9,)).standard_error)


def test_the_table_tells_every_round_and_a_line_the_ratios():
    done = [
        {"a": arm(10.0), "b": arm(9.0, tokens_per_s=80.0)},
        {"a": arm(20.0), "b": arm(18.0, tokens_per_s=80.0)},
    ]
    grid = settings.rounds_table(done, ["a", "b"])
    rows = list(zip(*(column.cells for column in grid.columns), strict=True))
    assert rows[0][:5] == ("a", "10.00 20.00", "20.00 40.00", "100 100", "0.500")
    assert rows[0][5:] == ("3.00", "0.25", "7", "90", "64")
    assert rows[1][1] == "9.00 18.00"
    assert settings.lines(done, ["a", "b"]) == [
        "b over a: mean JCT 0.900 ± 0.000 (0.90, 0.90), tokens a second 0.800 ± 0.000 "
        "(0.80, 0.80), turn p99 0.900 ± 0.000 (0.90, 0.90)"
    ]


@pytest.mark.parametrize(
    ("jct_s", "tokens_per_s", "missed"),
    [
        ((10.0, 10.0), 97.0, []),
        ((10.0, 10.2), 96.0, ["mean_jct_s", "output_tokens_per_s"]),
        ((12.1, 12.1), 97.0, ["mean_jct_s", "p99_turn_s"]),
        ((9.0, 11.0), 97.0, []),  # the mean of the ratios counts: 0.995
    ],
)
def test_the_bar_above_a_tier(jct_s, tokens_per_s, missed):
    plain, ours = above_tier.ARMS
    done = [
        {plain: arm(10.0), ours: arm(own_s, tokens_per_s=tokens_per_s)}
        for own_s in jct_s
    ]
    assert above_tier.missed(done, above_tier.LOADED) == missed
    told = above_tier.verdict(done, above_tier.LOADED)
    assert {what for what, line in told.items() if "MISSED" in line} == set(missed)


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


def test_the_command_line_says_what_is_wrong():
    result = CliRunner().invoke(app, ["settings", "--with", "{}"])
    assert result.exit_code == 2
    assert "at least twice" in result.output
