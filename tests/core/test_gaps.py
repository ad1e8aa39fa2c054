"""Gap history: recording, back-off, censoring, forgetting, bounds."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.curves import kaplan_meier
from ttlcache.estimators.gap_history import MAX_GAP_S, GapHistory
from ttlcache.types import APPROVAL_GAP, FINAL_GAP, USER_GAP, GapKey

GIT = GapKey("bash", "git")
BASH = GapKey("bash")


@pytest.fixture
def history():
    return GapHistory()


def num_censored(history, key):
    return history.count(key, with_censored=True) - history.count(key)


def durations(history, key=None):
    return history.durations(key).tolist()


def test_a_gap_is_recorded_under_every_coarser_key(history):
    history.start("turn 1", GIT, now_s=10.0)
    assert history.finish("turn 1", now_s=12.5) == 2.5
    for key in (GIT, BASH, None):
        assert durations(history, key) == [2.5]
        assert history.count(key) == 1
    assert history.count(GapKey("search")) == 0


def test_unknown_tokens_record_nothing(history):
    assert history.finish("never opened", 1.0) is None
    history.abandon("never opened", 1.0)
    history.drop("never opened")
    assert history.count() == 0
    history.start("a", BASH, 0.0)
    history.drop("a")
    assert history.finish("a", 1.0) is None
    # Opening a token again replaces it.
    history.start("b", GIT, 0.0)
    history.start("b", GapKey("search"), 5.0)
    assert len(history._open) == 1
    assert history.finish("b", 6.0) == 1.0
    assert history.count(GIT) == 0


@pytest.mark.parametrize("key", [USER_GAP, FINAL_GAP, APPROVAL_GAP])
def test_human_gaps_stay_out_of_the_global_window(history, key):
    history.observe(key, 600.0)
    history.observe(key, 600.0, completed=False)
    assert history.count(with_censored=True) == 0
    assert durations(history, key) == [600.0]


def test_back_off_finds_the_finest_key_with_enough_records(history):
    for key, times in ((GIT, 2), (BASH, 4)):
        for _ in range(times):
            history.observe(key, 1.0)
    # git 2, bash 2 + 4
    assert history.best_key(GIT, 1) == GIT
    assert history.best_key(GIT, 2) == BASH
    assert history.best_key(GIT, 6) is None
    assert history.best_key(GapKey("search"), 0) is None
    # Parallel calls are tools.
    both = GapKey.parallel((GIT, GapKey("search")))
    history.observe(both, 1.0, completed=False)
    assert history.best_key(both, 0) is None
    assert history.best_key(both, 0, with_censored=True) == both
    history.observe(both, 3.0)
    assert history.best_key(both, 0) == both
    assert history.count() == 7


def test_open_gaps_are_censored_at_their_age(history):
    for _ in range(3):
        history.observe(GIT, 1.0)
    history.start("open", GIT, now_s=10.0)
    assert history.survival(GIT).at(1.0) == 0.0
    # Half a second old: it says nothing yet about gaps of 1 s.
    assert history.survival(GIT, now_s=10.5).at(1.0) == 0.0
    assert history.survival(GIT, now_s=9.0).at(1.0) == 0.0  # the clock went back
    # Four seconds old: one of four lasted longer than 1 s.
    assert history.survival(GIT, now_s=14.0).at(1.0) == pytest.approx(0.25)
    history.drop("open")
    assert history.survival(GIT, now_s=14.0).at(1.0) == 0.0
    history.start("abandoned", GIT, now_s=10.0)
    history.abandon("abandoned", 14.0)
    assert history.survival(GIT).at(1.0) == pytest.approx(0.25)
    assert durations(history, GIT) == [1.0] * 3


def test_too_many_open_gaps_censor_the_oldest():
    history = GapHistory(max_open=2)
    for number in range(3):
        history.start(number, BASH, now_s=float(number))
    assert len(history._open) == 2
    assert num_censored(history, BASH) == 1
    assert history.finish(0, 9.0) is None
    assert history.finish(2, 9.0) == 7.0


def test_nonsense_is_not_recorded(history):
    for gap_s in (math.nan, math.inf):
        history.observe(BASH, gap_s)
        history.observe(BASH, gap_s, completed=False)
    assert history.count(with_censored=True) == 0
    history.observe(BASH, -1.0)
    history.observe(BASH, 1e300)
    assert durations(history) == [0.0, MAX_GAP_S]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=120),
    st.integers(1, 30),
)
@settings(max_examples=300, deadline=None)
def test_windows_equal_the_last_records(records, window):
    history = GapHistory(window=window, global_window=2 * window)
    seen = []
    for gap_s, completed, look in records:
        history.observe(BASH, gap_s, completed=completed)
        seen.append((gap_s, completed))
        if not look:  # changes pile up until somebody looks
            continue
        for key, size in ((BASH, window), (None, 2 * window)):
            kept = seen[-size:]
            assert durations(history, key) == sorted(g for g, c in kept if c)
            assert history.count(key) == sum(c for _, c in kept)
            assert num_censored(history, key) == sum(not c for _, c in kept)
            expected = kaplan_meier([g for g, _ in kept], [c for _, c in kept])
            curve = history.survival(key)
            for t in range(6):
                assert curve.at(t) == pytest.approx(expected.at(t), abs=1e-12)


def test_long_curves_lag_by_a_bounded_share(history):
    for _ in range(5000):
        history.observe(BASH, 1.0)
    history.survival(None)
    lag = 0
    while history.survival(None).at(0.5) == 1.0:  # up to date would be less
        history.observe(BASH, 0.0)
        lag += 1
    assert 5000 // 64 <= lag <= 5100 // 64 + 1
    assert history.survival(None).at(0.5) == pytest.approx(1.0 - lag / (5000 + lag))


def test_least_recently_written_keys_are_forgotten_first():
    history = GapHistory(max_keys=2)
    a, b, c = GapKey("a"), GapKey("b"), GapKey("c")
    for key in (a, b, a, c):
        history.observe(key, 1.0)
    assert [history.count(key) for key in (a, b, c)] == [2, 0, 1]
    assert history.count() == 4
    # Reading does not keep a key alive.
    history.durations(a)
    history.observe(b, 1.0)
    assert [history.count(key) for key in (a, b, c)] == [0, 1, 1]


def test_an_open_gap_outlives_the_forgetting_of_its_key():
    history = GapHistory(max_keys=1)
    history.start("a", GapKey("a"), 0.0)
    history.observe(GapKey("b"), 1.0)  # forgets "a"
    history.start("b", GapKey("b"), 0.0)
    history.observe(GapKey("a"), 1.0)  # a new window that does not know the token
    history.drop("a")
    history.drop("b")
    assert len(history._open) == 0
    assert history.survival(GapKey("a"), now_s=99.0).at(1.0) == 0.0
    history.start("b", GapKey("b"), 0.0)
    history.observe(GapKey("a"), 1.0)
    assert history.finish("b", 2.0) == 2.0
    assert history.count(GapKey("b")) == 1
