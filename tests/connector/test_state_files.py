"""What survives a restart, and what a profile file tells."""

from __future__ import annotations

import errno
import json
import threading

import pytest

from tests.connector.conftest import HOLD_5S
from ttlcache.errors import ConfigError
from ttlcache.estimators import gap_store
from ttlcache.types import GapKey
from ttlcache_connector.cli.sweep import fit
from ttlcache_connector.role.state_files import MIN_SAVE_INTERVAL_S

#: A failure, never a duration.
HANG_S = 300.0


@pytest.fixture
def start(make_engine, tmp_path):
    """Engines that keep their state in one folder."""

    def start(folder=tmp_path):
        extra = {**HOLD_5S, "state_dir": str(folder)}
        return make_engine(num_blocks=40, extra_config=extra)

    return start


def one_gap(engine, clock, seconds: float) -> None:
    context = engine.turn("A-1", range(50), hints={"program_id": "A", "tool": "ls"})
    clock.advance(seconds)
    engine.turn("A-2", [*context, 1], hints={"program_id": "A", "is_last_step": True})


def test_the_gap_history_survives_a_restart(start, clock):
    first = start()
    one_gap(first, clock, 2.5)
    first.scheduler.shutdown()
    second = start()
    gaps = second.controller.gaps
    assert gaps.count() == 1
    assert list(gaps.durations(GapKey("ls"))) == [2.5]


def test_it_is_saved_while_running(start, clock, tmp_path):
    path = tmp_path / "gaps.json"
    engine = start()
    one_gap(engine, clock, 2.5)
    assert not path.exists()
    clock.advance(MIN_SAVE_INTERVAL_S)
    engine.step()
    history = engine.role.parts.history
    assert history.flush(HANG_S)
    assert json.loads(path.read_text())
    # Nothing new: nothing is written, however long it goes on.
    path.unlink()
    clock.advance(1000.0)
    engine.step()
    assert history.flush(HANG_S)
    assert not path.exists()


class SlowDisk:
    """Stands for `gap_store.write`: blocks until it is let go."""

    def __init__(self, monkeypatch) -> None:
        self.free = threading.Event()
        self.writes = 0
        monkeypatch.setattr(gap_store, "write", self)

    def __call__(self, records, path, pause=None) -> bool:
        self.writes += 1
        return self.free.wait(HANG_S)


def test_the_engine_waits_for_no_disk_and_writes_one_by_one(start, clock, monkeypatch):
    disk = SlowDisk(monkeypatch)
    engine = start()
    for _ in range(5):
        one_gap(engine, clock, 2.5)
        clock.advance(1000.0)
        engine.step()
    assert disk.writes == 1
    disk.free.set()
    assert engine.role.parts.history.flush(HANG_S)
    engine.step()
    assert engine.role.parts.history.flush(HANG_S)
    assert disk.writes == 2


def test_a_disk_that_hangs_does_not_hold_up_the_end(start, clock, monkeypatch, our_log):
    disk = SlowDisk(monkeypatch)
    engine = start()
    one_gap(engine, clock, 2.5)
    engine.role.parts.history.close(timeout_s=0.05)
    assert disk.writes == 1
    assert any("not saved" in line for line in our_log)
    disk.free.set()


@pytest.mark.parametrize("call", ["fsync", "replace", "fdopen"])
def test_a_full_disk_keeps_the_old_file_and_the_engine(
    start, clock, tmp_path, monkeypatch, call, our_log
):
    def full_disk(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "gaps.json"
    first = start()
    one_gap(first, clock, 2.5)
    first.scheduler.shutdown()
    before = path.read_bytes()
    monkeypatch.setattr(gap_store.os, call, full_disk)
    engine = start()
    one_gap(engine, clock, 2.5)
    clock.advance(MIN_SAVE_INTERVAL_S)
    engine.step()
    engine.scheduler.shutdown()
    assert any("No space left" in line for line in our_log)
    assert engine.role.parts.faults.total == 0
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["gaps.json"]


def test_a_profile_seeds_the_costs(start, tmp_path):
    prefill = fit([(1000, 0.1), (2000, 0.2)])
    (tmp_path / "profile.json").write_text(json.dumps({"prefill": list(prefill)}))
    costs = start().controller.costs
    assert costs.prefill_s(1500) == pytest.approx(0.15, rel=0.05)


@pytest.mark.parametrize("content", ["no json", "[]", '{"prefill": "x"}'])
def test_a_wrong_profile_stops_the_server(start, tmp_path, content):
    (tmp_path / "profile.json").write_text(content)
    with pytest.raises(ConfigError, match="prof"):
        start()
