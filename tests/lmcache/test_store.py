"""The tier over memory and disk: every get is what was put, or a miss."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ttlcache.clock import VirtualClock
from ttlcache.errors import ConfigError
from ttlcache_lmcache import records
from ttlcache_lmcache.config import TierConfig
from ttlcache_lmcache.store import TieredStore

SIZE = 1000


def content(key: bytes, size: int = SIZE) -> bytes:
    return random.Random(key).randbytes(size)


def make(path: Path, clock: VirtualClock | None = None, **settings: Any) -> TieredStore:
    values = {"path": str(path), "disk_bytes": 1 << 20, **settings}
    return TieredStore(TierConfig(**values), clock or VirtualClock())


def get(store: TieredStore, key: bytes, size: int = SIZE) -> bytes | None:
    buffer = bytearray(size)
    return bytes(buffer) if store.read_into(key, memoryview(buffer)) else None


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


@pytest.mark.parametrize("place", ["header", "key", "payload", "cut", "longer", "gone"])
def test_damage_is_a_miss(tmp_path: Path, place: str) -> None:
    store = make(tmp_path)
    store.put(b"key", content(b"key"))
    path = file_of(tmp_path)
    raw = bytearray(path.read_bytes())
    if place == "gone":
        path.unlink()
    elif place == "cut":
        path.write_bytes(raw[:-1])
    elif place == "longer":
        path.write_bytes(raw + b"x")
        assert get(store, b"key") == content(b"key")  # what was written is all there
        store.close()
        assert make(tmp_path).headers() == []  # but a restart takes no such file
        return
    else:
        at = {"header": 9, "key": raw.index(b"key"), "payload": len(raw) - 7}[place]
        raw[at] ^= 1
        path.write_bytes(raw)
    assert get(store, b"key") is None
    assert store.find(b"key") is None
    assert store.disk_bytes == 0
    assert store.put(b"key", content(b"key"))
    assert get(store, b"key") == content(b"key")


def test_a_full_disk_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path)

    def no_space(fd: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(records.os, "write", no_space)
        assert not store.put(b"a", content(b"a"))
    assert store.find(b"a") is None
    assert store.disk_bytes == 0
    assert not list(tmp_path.glob("??/*"))
    assert store.put(b"a", content(b"a"))


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


class Hammer:
    """Mixed operations from many threads; a watcher checks the budgets."""

    KEYS = 200
    MEMORY = 20 * SIZE
    DISK = 60 * SIZE

    def __init__(self, path: Path, write_through: bool) -> None:
        self.clock = VirtualClock()
        self.store = make(
            path,
            self.clock,
            memory_bytes=self.MEMORY,
            disk_bytes=self.DISK,
            memory_ttl_s=5.0,
            disk_ttl_s=50.0,
            write_through=write_through,
        )
        self.problems: list[str] = []
        self.hits = 0

    def work(self, seed: int, operations: int) -> None:
        try:
            self._work(random.Random(seed), operations)
        except Exception as error:  # noqa: BLE001 - told to the main thread
            self.problems.append(repr(error))

    def _work(self, rng: random.Random, operations: int) -> None:
        for _ in range(operations):
            key = b"%d" % rng.randrange(self.KEYS)
            choice = rng.random()
            if choice < 0.35:
                self.store.put(key, content(key))
            elif choice < 0.8:
                locked = self.store.lock([key])[0]
                found = get(self.store, key)
                if locked:
                    self.store.unlock([key])
                if found is not None:
                    self.hits += 1
                    if found != content(key):
                        self.problems.append(f"wrong bytes for {key!r}")
            elif choice < 0.9:
                self.store.delete([key])
            else:
                self.clock.advance(rng.random() * 0.2)
                self.store.sweep()
            if self.store.memory_bytes > self.MEMORY:
                self.problems.append("memory budget")
            if self.store.disk_bytes > self.DISK:
                self.problems.append("disk budget")

    def run(self, threads: int, operations: int) -> None:
        workers = [
            threading.Thread(target=self.work, args=(i, operations // threads))
            for i in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=1800.0)
            assert not worker.is_alive(), "deadlock"


@pytest.mark.parametrize("write_through", [True, False])
def test_eight_threads(tmp_path: Path, write_through: bool) -> None:
    """A short form; a million were run once (docs/lmcache.md)."""
    hammer = Hammer(tmp_path, write_through)
    hammer.run(threads=8, operations=8_000)
    assert hammer.problems == []
    assert hammer.hits > 100
    on_disk = sum(p.stat().st_size for p in tmp_path.glob("??/*"))
    assert on_disk == hammer.store.disk_bytes
    assert hammer.store.status()["locked"] == 0


WRITER = """
import random, sys
from ttlcache.clock import SystemClock
from ttlcache_lmcache.config import TierConfig
from ttlcache_lmcache.store import TieredStore
store = TieredStore(TierConfig(path=sys.argv[1], disk_bytes=1 << 24), SystemClock())
for i in range(10**9):
    key = b"%d" % i
    assert store.put(key, random.Random(key).randbytes(20_000))
    print(i, flush=True)
"""


def test_sigkill_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    """Killed at random moments; each time every stored object is whole or absent."""
    rng = random.Random(7)
    folder = tmp_path / "kv"
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        last = -1
        for _ in range(rng.randrange(1, 150)):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
        store = make(folder, disk_bytes=1 << 24)
        for index in range(last + 1):
            key = b"%d" % index
            assert get(store, key, 20_000) == content(key, 20_000), index
        for header in store.headers():
            assert get(store, header.key, 20_000) == content(header.key, 20_000)
        assert not list(folder.glob("??/*.writing"))
        store.close()
        for path in folder.glob("??/*.kv"):
            path.unlink()
