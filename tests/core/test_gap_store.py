"""Gap histories on disk: round trip, and every way a file can be wrong."""

import json
import logging
import os

import pytest

from ttlcache.estimators import gap_store
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.types import USER_GAP, GapKey

GIT = GapKey("bash", "git")


def sample_history():
    history = GapHistory()
    for gap_s in (3.0, 1.0, 2.5):
        history.observe(GIT, gap_s)
    history.observe(GIT, 7.0, completed=False)
    history.observe(USER_GAP, 600.0)
    return history


def state_of(history):
    return {str(r.key): (r.gaps_s, r.completed) for r in history.export()}


def save(history, path):
    return gap_store.write(gap_store.snapshot(history), path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gaps.json"


@pytest.fixture
def saved(path):
    assert save(sample_history(), path)
    return path


def test_round_trip(saved):
    loaded = gap_store.load(saved)
    assert state_of(loaded) == state_of(sample_history())
    assert loaded.count() == 3
    assert loaded.survival(GIT).at(3.0) == sample_history().survival(GIT).at(3.0)
    assert os.listdir(saved.parent) == ["gaps.json"]


def test_loading_fills_the_given_history_and_keeps_its_limits(saved):
    history = GapHistory(window=2)
    assert gap_store.load(saved, history) is history
    assert history.durations(GIT).tolist() == [2.5]  # the last two: 2.5 and > 7
    assert history.count(GIT, with_censored=True) == 2


def test_open_gaps_are_not_saved(path):
    history = GapHistory()
    history.start("open", GIT, 0.0)
    assert save(history, path)
    loaded = gap_store.load(path)
    assert loaded.count(with_censored=True) == 0
    assert loaded.finish("open", 1.0) is None


def test_a_missing_file_is_a_silent_first_start(path, caplog):
    assert gap_store.load(path).count() == 0
    assert caplog.records == []


def edited(window=None, **changes):
    state = {
        "format": "ttlcache-gaps",
        "version": 3,
        "windows": [{"key": None, "gaps_s": [1.0], "completed": "1", **(window or {})}],
    }
    return json.dumps(state | changes).encode()


WRONG = {
    "empty": b"",
    "not json": b"\x00\x01\x02 nonsense",
    "not utf-8": b'{"format": "\xff\xfe"}',
    "a list": b"[1, 2]",
    "a number": b"7",
    "deep": b"[" * 100_000,
    "another format": edited(format="other"),
    "an unknown version": edited(version=99),
    "no version": edited(version=None),
    "windows of another type": edited(windows={"a": 1}),
    "a window of another type": edited(windows=[3]),
    "too many windows": edited(windows=[{}] * (gap_store.MAX_KEYS + 2)),
    "no records": edited({"gaps_s": None}),
    "marks too short": edited({"completed": ""}),
    "unknown marks": edited({"completed": "x"}),
    "negative gap": edited({"gaps_s": [-1.0]}),
    "nan": edited({"gaps_s": [float("nan")]}),
    "infinite": edited({"gaps_s": [float("inf")]}),
    "beyond a lifetime": edited({"gaps_s": [1e10]}),
    "boolean gap": edited({"gaps_s": [True]}),
    "text gap": edited({"gaps_s": ["1"]}),
    "gap beyond floats": edited({"gaps_s": [10**400]}),
    "key too short": edited({"key": ["bash"]}),
    "key of numbers": edited({"key": [1, 2]}),
    "key of another type": edited({"key": "bash"}),
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_file_is_an_empty_history_and_a_warning(path, caplog, content):
    path.write_bytes(content)
    loaded = gap_store.load(path)
    assert state_of(loaded) == state_of(GapHistory())
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert str(path) in caplog.text


def test_the_edited_file_is_right_when_nothing_is_edited(path):
    path.write_bytes(edited())
    assert gap_store.load(path).count() == 1


def test_every_truncation_is_an_empty_history(saved):
    content = saved.read_bytes()
    for size in range(len(content)):
        saved.write_bytes(content[:size])
        assert gap_store.load(saved).count() == 0


def test_a_huge_file_is_not_read(saved, caplog, monkeypatch):
    monkeypatch.setattr(gap_store, "MAX_FILE_BYTES", 10)
    assert gap_store.load(saved).count() == 0
    assert "larger than 10 bytes" in caplog.text


def test_a_folder_in_the_file_s_place_is_a_warning(tmp_path, caplog):
    assert gap_store.load(tmp_path).count() == 0
    assert not save(sample_history(), tmp_path)
    assert not save(sample_history(), tmp_path / "no" / "gaps.json")
    assert len(caplog.records) == 3
    assert caplog.text.count("not saved") == 2
    assert os.listdir(tmp_path) == []


def test_the_file_is_bounded_and_keeps_the_freshest(path):
    history = GapHistory(window=1000, max_keys=3000)
    for number in range(2000):
        for _ in range(10):
            history.observe(GapKey(f"tool{number}"), number / 7)
    for _ in range(1000):
        history.observe(GapKey("busy"), 123.456789)
    assert save(history, path)
    assert path.stat().st_size < 4_000_000
    loaded = gap_store.load(path)
    assert loaded.count(GapKey("busy")) == gap_store.MAX_RECORDS
    assert loaded.count(GapKey("tool1999")) == 10
    assert loaded.count(GapKey("tool0")) == 0
    assert loaded.count() == gap_store.MAX_GLOBAL_RECORDS
    # The freshest key is still the last to go.
    assert str(next(r.key for r in loaded.export() if r.key)) == "busy"
