"""The disk tier: every get is what was put, or a miss."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128

from bench.stress.lmcache_store import SIZE, Hammer, content, get, survive_kills
from ttlcache.clock import VirtualClock
from ttlcache.errors import ConfigError
from ttlcache_lmcache.config import DiskConfig
from ttlcache_lmcache.store import object_file
from ttlcache_lmcache.store.store import DiskStore


def make(path, clock=None, **settings: Any) -> DiskStore:
    values = {"path": str(path), "disk_bytes": 1 << 20, **settings}
    return DiskStore(DiskConfig(**values), clock or VirtualClock())


def full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


def file_of(store_path: Path) -> Path:
    (path,) = store_path.glob("??/*.kv")
    return path


def test_what_was_put_comes_back_also_after_a_restart(tmp_path):
    store = make(tmp_path)
    assert store.put(b"a", content(b"a"))
    assert get(store, b"b") is None
    assert get(store, b"a", SIZE + 1) is None
    with pytest.raises(ConfigError, match="no other process"):
        make(tmp_path)
    store.close()
    again = make(tmp_path)
    assert get(again, b"a") == content(b"a")
    assert again.used_bytes == store.used_bytes > SIZE
    # But no file that grew meanwhile.
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes() + b"x")
    assert get(again, b"a") == content(b"a")  # what was written is all there
    again.close()
    assert make(tmp_path).headers() == []


def test_a_use_keeps_a_file_over_a_restart(tmp_path, monkeypatch):
    clock, stamped, real = VirtualClock(1000.0), [], os.utime

    def utime(path: Path) -> None:
        stamped.append(clock.now_s())
        real(path)

    store = make(tmp_path, clock, disk_ttl_s=100.0)
    store.put(b"a", content(b"a"))
    os.utime(file_of(tmp_path), (0.0, 0.0))  # long ago
    monkeypatch.setattr(os, "utime", utime)
    for _ in range(40):
        assert get(store, b"a") == content(b"a")
        clock.advance(0.25)
    assert stamped == [1005.0]  # not at every hit
    store.close()
    assert make(tmp_path, clock, disk_ttl_s=100.0).find(b"a") is not None


def test_what_nobody_uses_is_removed(tmp_path):
    clock = VirtualClock()
    store = make(tmp_path, clock, disk_ttl_s=100.0)
    for key in (b"a", b"b"):
        assert store.put(key, content(key))
    clock.advance(99.0)
    assert get(store, b"a") == content(b"a")
    clock.advance(1.0)
    store.sweep()
    assert {header.key for header in store.headers()} == {b"a"}
    clock.advance(99.0)
    store.sweep()
    assert (store.used_bytes, store.headers()) == (0, [])
    assert not list(tmp_path.glob("??/*"))


def test_locked_objects_stay(tmp_path):
    clock = VirtualClock()
    store = make(tmp_path, clock, disk_bytes=2 * (SIZE + 100), disk_ttl_s=10.0)
    store.put(b"a", content(b"old"))
    assert store.lock([b"a", b"x"]) == [True, False]
    for key in (b"b", b"c"):
        store.put(key, content(key))
    # The unlocked one went, though it was younger.
    assert [store.find(key) is not None for key in (b"a", b"b")] == [True, False]
    clock.advance(20.0)
    store.sweep()
    assert [h.key for h in store.headers()] == [b"a"]
    assert store.delete([b"a"]) == []
    # The same tokens once more are a use; those of another size replace it later.
    assert store.put(b"a", content(b"new"))
    assert not store.put(b"a", content(b"new")[1:])
    assert get(store, b"a") == content(b"old")
    store.unlock([b"a"])
    assert store.put(b"a", content(b"new")[1:])
    assert store.find(b"a").size == len(content(b"new")) - 1
    assert store.delete([b"a"]) == [b"a"]


@pytest.mark.parametrize("fault", ["file is gone", "disk is full"])
def test_a_fault_is_a_miss_and_it_may_be_put_again(tmp_path, monkeypatch, fault):
    store = make(tmp_path)
    with monkeypatch.context() as patched:
        if fault == "disk is full":
            patched.setattr(object_file.os, "write", full_disk)
        assert store.put(b"key", content(b"key")) == (fault != "disk is full")
    if fault == "file is gone":
        file_of(tmp_path).unlink()
    assert get(store, b"key") is None
    assert store.find(b"key") is None
    assert store.used_bytes == 0
    assert not list(tmp_path.glob("??/*"))
    assert store.put(b"key", content(b"key"))
    assert get(store, b"key") == content(b"key")


def test_a_file_system_that_is_full_before_its_bound_takes_the_youngest(
    tmp_path, monkeypatch
):
    store = make(tmp_path)
    real = os.write

    def write(fd: int, data: memoryview) -> int:
        if len(list(tmp_path.glob("??/*.kv"))) >= 3:
            full_disk()
        return real(fd, data)

    monkeypatch.setattr(object_file.os, "write", write)
    keys = [b"%d" % number for number in range(9)]
    assert all(store.put(key, content(key)) for key in keys)
    assert [store.find(key) is not None for key in keys] == 6 * [False] + 3 * [True]
    assert store.counts["disk_evicted"] == store.counts["write_errors"] == 6


def test_only_what_may_have_come_from_the_disk_is_verified(tmp_path, monkeypatch):
    store, digested = make(tmp_path), []

    class Digest:
        def __init__(self) -> None:
            digested.append(self)
            self.inner = xxh3_128()
            self.update, self.digest = self.inner.update, self.inner.digest

    monkeypatch.setattr(object_file.xxhash, "xxh3_128", Digest)
    store.put(b"a", content(b"a"))
    digested.clear()
    assert get(store, b"a") == content(b"a")  # as it was written
    assert not digested
    path, fd = file_of(tmp_path), os.open(file_of(tmp_path), os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    assert get(store, b"a") == content(b"a")
    assert len(digested) == 1
    assert get(store, b"a") == content(b"a")  # as it was verified
    assert len(digested) == 1
    os.utime(path)
    assert get(store, b"a") == content(b"a")
    assert len(digested) == 2


def test_a_file_of_which_a_part_is_cached_is_verified(tmp_path):
    """`RWF_NOWAIT` alone may return pages that the disk has just delivered."""
    data = memoryview(os.urandom(1 << 25))
    path, into = tmp_path / "aa" / "x.kv", memoryview(bytearray(1 << 25))
    path.parent.mkdir()
    object_file.write(path, b"x", data)
    with path.open("rb") as file:
        assert object_file._read_cached(file.fileno(), into)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(file.fileno(), 1 << 24, 0)
        assert not object_file._read_cached(file.fileno(), into)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_flipped_bit_is_a_miss(tmp_path):
    """Wherever in the file: header, key, payload; none comes back as something else."""
    store, data = make(tmp_path), content(b"key", 300)
    store.put(b"key", data)
    path = file_of(tmp_path)
    raw = path.read_bytes()
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << at % 8
        other = tmp_path / "damaged"  # in another file: ctime has a tick of 4 ms
        other.write_bytes(damaged)
        other.replace(path)
        assert get(store, b"key", len(data)) is None
        assert store.put(b"key", data)
    assert store.counts["corrupt"] == len(raw)
    # Nor is another object's file, whole, but under the wrong name.
    store.put(b"a", data)
    object_file.path_of(tmp_path, b"a").replace(path)
    assert get(store, b"key", len(data)) is None
    assert store.counts["corrupt"] == len(raw) + 1


@pytest.mark.parametrize("keep", [0, 1, 50, SIZE // 2, SIZE + 10])
def test_a_file_cut_short_is_a_miss_now_and_after_a_restart(tmp_path, keep):
    store = make(tmp_path)
    for key in (b"now", b"later", b"whole"):
        store.put(key, content(key))
    os.truncate(object_file.path_of(tmp_path, b"now"), keep)
    assert get(store, b"now") is None
    os.truncate(object_file.path_of(tmp_path, b"later"), keep)
    store.close()
    again = make(tmp_path)
    assert [get(again, key) for key in (b"now", b"later")] == [None, None]
    assert get(again, b"whole") == content(b"whole")
    assert store.counts["corrupt"] == again.counts["corrupt"] == 1
    assert len(list(tmp_path.glob("??/*"))) == 1


def test_faults_are_counted_by_kind_and_logged_once_each(tmp_path, caplog, monkeypatch):
    store = make(tmp_path)
    keys = [b"%d" % number for number in range(9)]
    for key in keys:
        store.put(key, content(key))
    paths = [object_file.path_of(tmp_path, key) for key in keys]
    for path in paths[:3]:
        os.truncate(path, 0)
    for path in paths[3:]:
        path.unlink()
    for path in paths[6:]:
        path.mkdir()  # reading it is an error of the system
    with caplog.at_level(logging.ERROR):
        assert [get(store, key) for key in keys] == [None] * 9
        assert [store.find(key) for key in keys[:6]] == [None] * 6
        assert None not in [store.find(key) for key in keys[6:]], "may be whole"
        monkeypatch.setattr(object_file.os, "write", full_disk)
        assert not any(store.put(key, content(key)) for key in keys[:3])
    kinds = ("corrupt", "missing", "read_errors", "write_errors")
    assert [store.counts[kind] for kind in kinds] == [3, 3, 3, 6], "all tried twice"
    assert len(caplog.messages) == 4


@pytest.mark.parametrize("umask", [0, 0o022])
@pytest.mark.parametrize("holds_more", [False, True])
def test_only_its_owner_reads_what_is_on_disk(tmp_path, umask, holds_more):
    """What was open to others is closed at the next start.

    But a folder that holds more keeps its mode, as with `--disk /mnt`.
    """
    folder = tmp_path / "kv"
    if holds_more:
        folder.mkdir()
        folder.chmod(0o755)
        (folder / "lost+found").mkdir()
    of_folder = 0o755 if holds_more else 0o700
    before = os.umask(umask)
    try:
        store = make(folder)
        store.put(b"a", content(b"a"))
        for _ in range(2):
            path = file_of(folder)
            assert (mode_of(folder), mode_of(path.parent)) == (of_folder, 0o700)
            assert mode_of(path) == mode_of(folder / ".ttlcache.lock") == 0o600
            store.close()
            for each, mode in ((folder, 0o755), (path.parent, 0o755), (path, 0o644)):
                each.chmod(mode)
            store = make(folder)
            assert get(store, b"a") == content(b"a")
    finally:
        os.umask(before)


def test_files_of_others_in_the_folder_stay(tmp_path):
    """Names that are not ours, and links."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    folder = tmp_path / "kv"
    others = [
        folder / "ui/main.kv",
        folder / "ab/x.writing",
        elsewhere / f"{'a' * 40}.kv",
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("theirs")
    (folder / "cd").symlink_to(elsewhere)
    (folder / "ef").symlink_to("nowhere")
    make(folder).close()
    assert [path.read_text() for path in others] == ["theirs"] * 3
    assert mode_of(elsewhere) == 0o755


def test_eight_threads(tmp_path):
    """A short form; `bench lmcache-store` runs a million."""
    hammer = Hammer(tmp_path)
    hammer.run(threads=8, operations=8_000)
    assert hammer.problems == []
    assert hammer.hits > 100
    on_disk = sum(p.stat().st_size for p in tmp_path.glob("??/*"))
    assert on_disk == hammer.store.used_bytes
    assert hammer.store.status()["locked"] == 0


def test_sigkill_loses_nothing_that_was_stored(tmp_path):
    """A few of the kills of `bench lmcache-store`, at random moments."""
    found = survive_kills(tmp_path / "kv", kills=4, seed=7)
    assert found.problems == []
    assert found.found >= found.stored >= 4


def test_a_process_out_of_file_descriptors_loses_no_file(tmp_path, monkeypatch):
    """Nor does one that starts again meanwhile: it knows less, until the next start."""
    store = make(tmp_path)
    store.put(b"key", content(b"key"))
    with monkeypatch.context() as patched:
        patched.setattr(object_file.os, "open", too_many_files)
        assert get(store, b"key") is None
    store.put(b"key", content(b"other"))
    assert get(store, b"key") == content(b"other"), "it may not be readable again"
    store.put(b"key", content(b"key"))
    assert get(store, b"key") == content(b"other")
    store.close()
    with monkeypatch.context() as patched:
        patched.setattr(object_file, "read_header", too_many_files)
        again = make(tmp_path)
    assert (again.headers(), again.counts["read_errors"]) == ([], 1)
    again.close()
    assert get(make(tmp_path), b"key") == content(b"other")


def too_many_files(*_):
    raise OSError(24, "Too many open files")
