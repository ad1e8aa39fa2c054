"""The tier over memory and disk: every get is what was put, or a miss."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from bench.stress.lmcache_store import SIZE, Hammer, content, get, survive_kills
from ttlcache.clock import VirtualClock
from ttlcache.errors import ConfigError
from ttlcache_lmcache.config import TierConfig
from ttlcache_lmcache.store import object_file
from ttlcache_lmcache.store.store import TieredStore


def make(path: Path, clock: VirtualClock | None = None, **settings: Any) -> TieredStore:
    values = {"path": str(path), "disk_bytes": 1 << 20, **settings}
    return TieredStore(TierConfig(**values), clock or VirtualClock())


def file_of(store_path: Path) -> Path:
    (path,) = store_path.glob("??/*.kv")
    return path


def test_what_was_put_comes_back(tmp_path: Path) -> None:
    store = make(tmp_path)
    assert store.put(b"a", content(b"a"), meta=b"shape")
    assert get(store, b"a") == content(b"a")
    header = store.find(b"a")
    assert header is not None
    assert header.meta == b"shape"
    assert get(store, b"b") is None
    assert get(store, b"a", SIZE + 1) is None


def test_a_restart_finds_it_again(tmp_path: Path) -> None:
    store = make(tmp_path)
    store.put(b"a", content(b"a"), meta=b"m")
    store.close()
    again = make(tmp_path)
    assert get(again, b"a") == content(b"a")
    assert [h.meta for h in again.headers()] == [b"m"]
    assert again.disk_bytes == store.disk_bytes > SIZE


def test_a_restart_keeps_what_was_used_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock(1000.0)
    settings = {"memory_bytes": 10 * SIZE, "disk_ttl_s": 100.0}
    stamped: list[float] = []
    real = os.utime

    def utime(path: Path) -> None:
        stamped.append(clock.now_s())
        real(path)

    store = make(tmp_path, clock, **settings)
    store.put(b"a", content(b"a"))
    os.utime(file_of(tmp_path), (0.0, 0.0))  # long ago
    monkeypatch.setattr(os, "utime", utime)
    for _ in range(40):
        assert get(store, b"a") == content(b"a")
        clock.advance(0.25)
    assert store.counts["memory_hits"] == 40
    assert stamped == [1005.0]  # not at every hit
    store.close()
    assert make(tmp_path, clock, **settings).find(b"a") is not None


def test_memory_goes_to_disk_when_idle_and_away_at_the_end(tmp_path: Path) -> None:
    clock = VirtualClock()
    store = make(
        tmp_path,
        clock,
        memory_bytes=10 * SIZE,
        memory_ttl_s=10.0,
        disk_ttl_s=100.0,
        write_through=False,
    )
    store.put(b"a", content(b"a"))
    assert (store.memory_bytes, store.disk_bytes) == (SIZE, 0)
    clock.advance(9.0)
    store.sweep()
    assert store.memory_bytes == SIZE
    clock.advance(1.0)
    store.sweep()
    assert store.memory_bytes == 0
    assert store.disk_bytes > SIZE
    assert get(store, b"a") == content(b"a")  # comes up again, and lives on
    assert store.memory_bytes == SIZE
    clock.advance(99.0)
    store.sweep()
    assert store.find(b"a") is not None
    clock.advance(1.0)
    store.sweep()
    assert store.find(b"a") is None
    assert (store.memory_bytes, store.disk_bytes) == (0, 0)
    assert not list(tmp_path.glob("??/*"))


def test_locked_objects_stay(tmp_path: Path) -> None:
    clock = VirtualClock()
    room = 2 * (SIZE + 100)
    store = make(tmp_path, clock, disk_bytes=room, disk_ttl_s=10.0)
    store.put(b"a", content(b"a"))
    assert store.lock([b"a", b"x"]) == [True, False]
    store.put(b"b", content(b"b"))
    store.put(b"c", content(b"c"))
    assert store.find(b"a") is not None
    assert store.find(b"b") is None  # the unlocked one went, though it was younger
    clock.advance(20.0)
    store.sweep()
    assert [h.key for h in store.headers()] == [b"a"]
    assert store.delete([b"a"]) == []
    store.unlock([b"a"])
    assert store.delete([b"a"]) == [(b"a", SIZE)]


def test_a_file_that_is_gone_is_a_miss_and_may_be_put_again(tmp_path: Path) -> None:
    store = make(tmp_path)
    store.put(b"key", content(b"key"))
    file_of(tmp_path).unlink()
    assert get(store, b"key") is None
    assert store.find(b"key") is None
    assert store.disk_bytes == 0
    assert store.put(b"key", content(b"key"))
    assert get(store, b"key") == content(b"key")


def test_a_restart_takes_no_file_that_grew(tmp_path: Path) -> None:
    store = make(tmp_path)
    store.put(b"key", content(b"key"))
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes() + b"x")
    assert get(store, b"key") == content(b"key")  # what was written is all there
    store.close()
    assert make(tmp_path).headers() == []


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_flipped_bit_is_a_miss(tmp_path: Path) -> None:
    """Wherever in the file: header, key, payload; none comes back as something else."""
    store, data = make(tmp_path), content(b"key", 300)
    store.put(b"key", data)
    path = file_of(tmp_path)
    raw = path.read_bytes()
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        assert get(store, b"key", len(data)) is None
        assert store.put(b"key", data)
    assert store.counts["corrupt"] == len(raw)


@pytest.mark.parametrize("keep", [0, 1, 50, SIZE // 2, SIZE + 10])
def test_a_file_cut_short_is_a_miss_now_and_after_a_restart(
    tmp_path: Path, keep: int
) -> None:
    store = make(tmp_path)
    for key in (b"now", b"later", b"whole"):
        store.put(key, content(key))

    def cut(key: bytes) -> None:
        os.truncate(object_file.path_of(tmp_path, key), keep)

    cut(b"now")
    assert get(store, b"now") is None
    cut(b"later")
    store.close()
    again = make(tmp_path)
    assert [get(again, key) for key in (b"now", b"later")] == [None, None]
    assert get(again, b"whole") == content(b"whole")
    assert store.counts["corrupt"] == again.counts["corrupt"] == 1
    assert len(list(tmp_path.glob("??/*"))) == 1


def test_another_objects_file_is_a_miss(tmp_path: Path) -> None:
    """Whole, but under the wrong name."""
    store = make(tmp_path)
    store.put(b"a", content(b"a"))
    store.put(b"b", content(b"b"))
    object_file.path_of(tmp_path, b"a").replace(object_file.path_of(tmp_path, b"b"))
    assert get(store, b"b") is None
    assert store.counts["corrupt"] == 1


def test_faults_are_counted_by_kind_and_logged_once_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path)
    keys = [b"%d" % number for number in range(9)]
    for key in keys:
        store.put(key, content(key))
    for key in keys[:3]:
        os.truncate(object_file.path_of(tmp_path, key), 0)
    for key in keys[3:6]:
        object_file.path_of(tmp_path, key).unlink()
    for key in keys[6:]:
        path = object_file.path_of(tmp_path, key)
        path.unlink()
        path.mkdir()  # reading it is an error of the system
    with caplog.at_level(logging.ERROR):
        assert [get(store, key) for key in keys] == [None] * 9
        with monkeypatch.context() as patched:

            def fail(*_: object) -> int:
                raise OSError(5, "Input/output error")

            patched.setattr(object_file.os, "writev", fail)
            assert not any(store.put(key, content(key)) for key in keys[:3])
    kinds = ("corrupt", "missing", "read_errors", "write_errors")
    assert [store.counts[kind] for kind in kinds] == [3, 3, 3, 3]
    assert len(caplog.messages) == 4


@pytest.mark.parametrize("umask", [0, 0o022])
def test_only_its_owner_reads_what_is_on_disk(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "kv"
    before = os.umask(umask)
    try:
        store = make(folder)
        store.put(b"a", content(b"a"))
    finally:
        os.umask(before)
    path = file_of(folder)
    assert (mode_of(folder), mode_of(path.parent)) == (0o700, 0o700)
    assert mode_of(path) == mode_of(folder / ".ttlcache.lock") == 0o600


def test_what_was_open_to_others_is_closed_at_the_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = make(folder)
    store.put(b"a", content(b"a"))
    store.close()
    path = file_of(folder)
    for each, mode in ((folder, 0o755), (path.parent, 0o755), (path, 0o644)):
        each.chmod(mode)
    again = make(folder)
    assert get(again, b"a") == content(b"a")
    assert (mode_of(folder), mode_of(path.parent)) == (0o700, 0o700)
    assert mode_of(path) == 0o600


def test_a_folder_that_holds_more_keeps_its_mode(tmp_path: Path) -> None:
    """`--disk /mnt`: what else is there stays within reach of others."""
    tmp_path.chmod(0o755)
    (tmp_path / "lost+found").mkdir()
    store = make(tmp_path)
    store.put(b"a", content(b"a"))
    assert mode_of(tmp_path) == 0o755
    assert mode_of(file_of(tmp_path).parent) == 0o700


def test_a_full_disk_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path)

    def no_space(fd: int, data: list[memoryview]) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(object_file.os, "writev", no_space)
        assert not store.put(b"a", content(b"a"))
    assert store.find(b"a") is None
    assert store.disk_bytes == 0
    assert store.counts["write_errors"] == 1
    assert not list(tmp_path.glob("??/*"))
    assert store.put(b"a", content(b"a"))


def test_what_is_promised_on_its_way_to_a_full_disk_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    store = make(
        tmp_path, clock, memory_bytes=2 * SIZE, memory_ttl_s=10.0, write_through=False
    )
    store.put(b"a", content(b"a"))
    clock.advance(20.0)
    promised: list[bool] = []

    def full(*_: object) -> None:
        promised.extend(store.lock([b"a"]))
        raise OSError(28, "no space left")

    monkeypatch.setattr(object_file, "write", full)
    store.sweep()
    assert promised == [True]
    assert get(store, b"a") == content(b"a")
    store.unlock([b"a"])
    assert store.delete([b"a"]) == [(b"a", SIZE)]
    assert (store.memory_bytes, store.disk_bytes) == (0, 0)


def test_two_owners_are_refused(tmp_path: Path) -> None:
    store = make(tmp_path)
    with pytest.raises(ConfigError, match="no other process"):
        make(tmp_path)
    store.close()
    make(tmp_path).close()


def test_other_bytes_replace_the_old_unless_promised(tmp_path: Path) -> None:
    store = make(tmp_path)
    store.put(b"a", content(b"old"))
    store.lock([b"a"])
    assert not store.put(b"a", content(b"new"))
    assert get(store, b"a") == content(b"old")
    store.unlock([b"a"])
    assert store.put(b"a", content(b"new"))
    assert get(store, b"a") == content(b"new")


@pytest.mark.parametrize("write_through", [True, False])
def test_eight_threads(tmp_path: Path, write_through: bool) -> None:
    """A short form; `bench lmcache-store` runs a million."""
    hammer = Hammer(tmp_path, write_through)
    hammer.run(threads=8, operations=8_000)
    assert hammer.problems == []
    assert hammer.hits > 100
    on_disk = sum(p.stat().st_size for p in tmp_path.glob("??/*"))
    assert on_disk == hammer.store.disk_bytes
    assert hammer.store.status()["locked"] == 0


def test_sigkill_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    """A few of the kills of `bench lmcache-store`, at random moments."""
    found = survive_kills(tmp_path / "kv", kills=4, seed=7)
    assert found.problems == []
    assert found.found >= found.stored >= 4
