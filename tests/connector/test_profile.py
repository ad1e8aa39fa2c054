"""The offline profile on an engine whose cost is known."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from ttlcache.cli.main import app
from ttlcache_connector.cli import profile
from ttlcache_connector.cli.sweep import FIRST_TOKENS, ROUNDS, Curve, sweep

A, B, C = 2e-5, 3e-10, 0.004


class Engine:
    """Time passes only while it prefills; `stall` tells how long a call waits."""

    def __init__(
        self, scale: float = 1.0, stall: Callable[[int], float] = lambda call: 0.0
    ) -> None:
        self.now_s = 0.0
        self.asked: list[int] = []
        self.scale = scale
        self.stall = stall

    def measure(self, tokens: int) -> float:
        self.asked.append(tokens)
        seconds = self.scale * (A * tokens + B * tokens**2 + C)
        seconds += self.stall(len(self.asked))
        self.now_s += seconds
        return seconds

    def sweep(self, longest: int, budget_s: float) -> Curve:
        return sweep(self.measure, longest, budget_s, lambda: self.now_s)


LENGTHS = [1000, 2000, 4000, 8000, 16000, 32000]


def test_a_known_curve_is_found():
    # A stall in every second round: the fastest counts.
    engine = Engine(stall=lambda call: 0.5 * (call // len(LENGTHS) % 2))
    curve = engine.sweep(32_000, 90.0)
    assert curve.coefficients == pytest.approx((A, B, C), rel=1e-6)
    assert [point.tokens for point in curve.points] == LENGTHS
    assert max(abs(point.error) for point in curve.points) < 1e-6
    assert curve.skipped == []
    assert len(engine.asked) == 1 + ROUNDS * len(LENGTHS)


def test_it_ends_within_its_budget_and_names_what_it_skipped():
    engine = Engine(scale=100.0)
    curve = engine.sweep(1_000_000, 60.0)
    assert engine.now_s < 60.0
    assert len(curve.points) >= 2
    assert len(curve.skipped) > 5
    assert min(curve.skipped) > max(engine.asked)


@pytest.mark.parametrize(("budget_s", "is_measured"), [(40.0, True), (12.0, False)])
def test_a_length_is_tried_if_it_fits_the_time_that_is_left(budget_s, is_measured):
    # The first two lengths take 7 s, and the third at most four times the second's.
    curve = Engine(scale=100.0).sweep(4_000, budget_s)
    assert (4_000 not in curve.skipped) == is_measured


def test_a_short_model_is_profiled_as_far_as_it_goes():
    engine = Engine()
    curve = engine.sweep(700, 90.0)
    assert [point.tokens for point in curve.points] == [700]
    assert max(engine.asked) == 700
    assert FIRST_TOKENS > 700


#: Even on a CPU this decides how much memory vLLM reserves: most of it.
LESS = """--engine '{"gpu_memory_utilization": 0.4}'"""


@pytest.mark.parametrize(
    ("is_there", "said"),
    [(True, ["error: vLLM did not start", LESS]), (False, ["needs vLLM beside"])],
)
def test_without_a_vllm_it_ends_with_a_sentence(tmp_path, monkeypatch, is_there, said):
    if not is_there:
        monkeypatch.setitem(sys.modules, "vllm", None)
    out = tmp_path / "profile.json"
    done = CliRunner().invoke(app, ["profile", str(tmp_path), "--out", str(out)])
    assert done.exit_code == 1
    for part in said:
        assert part in done.output
    assert isinstance(done.exception, SystemExit)  # no traceback
    assert not out.exists()


def test_a_file_that_cannot_be_written_is_said_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "_start", lambda *_: pytest.fail("vLLM was started"))
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file" / "profile.json"):
        done = CliRunner().invoke(app, ["profile", "MODEL", "--out", str(out)])
        assert done.exit_code == 1
        assert f"--out {out}" in done.output.replace("\n", "")
