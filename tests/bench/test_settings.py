"""`bench settings`: what it accepts, and what its table says of the rounds."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from bench import settings
from bench.cli import app
from bench.ratios import Ratio


def arm(jct_s, prompt_hit=0.5):
    return SimpleNamespace(
        summary=SimpleNamespace(
            mean_jct_s=jct_s, p95_jct_s=2 * jct_s, prompt_hit=prompt_hit
        )
    )


def test_each_round_is_compared_with_its_own_base():
    done = [{"a": arm(10.0), "b": arm(5.0)}, {"a": arm(40.0), "b": arm(80.0)}]
    (ratio,) = settings.ratios(done, ["a", "b"]).values()
    assert ratio.by_round == (0.5, 2.0)
    assert ratio.geometric_mean == pytest.approx(1.0)
    # ln 2 and -ln 2: their standard deviation is sqrt(2) ln 2, of the mean ln 2.
    assert ratio.standard_error == pytest.approx(math.log(2.0))


def test_one_round_has_no_error():
    assert math.isnan(Ratio((0.9,)).standard_error)


def test_the_table_tells_every_round_and_the_ratio():
    done = [{"a": arm(10.0), "b": arm(9.0)}, {"a": arm(20.0), "b": arm(18.0)}]
    grid = settings.table(done, ["a", "b"])
    rows = list(zip(*(column.cells for column in grid.columns), strict=True))
    assert rows[0] == ("a", "10.00 20.00", "20.00 40.00", "0.500", "")
    assert rows[1][1] == "9.00 18.00"
    assert rows[1][4] == "0.900 ± 0.000 (0.90, 0.90)"


def test_the_order_turns_around():
    chosen = settings.parse(["{}", "vanilla"])
    assert settings._in_turn(chosen, 0) == [(0, "{}"), (1, "vanilla")]
    assert settings._in_turn(chosen, 1) == [(1, "vanilla"), (0, "{}")]


def test_settings_are_json_objects_or_vanilla():
    chosen = settings.parse(["vanilla", '{"admission": "none"}'])
    assert chosen == {"vanilla": None, '{"admission": "none"}': {"admission": "none"}}


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["{}"], "at least twice"),
        (["{}", "{}"], "given twice"),
        (["{}", "{"], "not JSON"),
        (["{}", "[]"], "expected a JSON object"),
        (["{}", '{"lower_tier": "lmcache"}'], "bench demote"),
    ],
)
def test_other_settings_are_refused(texts, told):
    with pytest.raises(ValueError, match=told):
        settings.parse(texts)


def test_the_command_line_says_what_is_wrong():
    result = CliRunner().invoke(app, ["settings", "--with", "{}"])
    assert result.exit_code == 2
    assert "at least twice" in result.output
