"""The store below the LMCache plugins under threads and under SIGKILL.

`Hammer` mixes operations from many threads while it checks budgets and bytes;
`survive_kills` kills a writing process at random moments and looks at what it left.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from ttlcache.cli.command import option
from ttlcache.clock import VirtualClock
from ttlcache_lmcache.config import DiskConfig
from ttlcache_lmcache.store.store import DiskStore

SIZE = 1000
_WRITTEN_BYTES = 20_000
_MAX_WRITES = 150
_JOIN_TIMEOUT_S = 6 * 3600.0
_WRITER = f"""
import random, sys
from ttlcache.clock import SystemClock
from ttlcache_lmcache.config import DiskConfig
from ttlcache_lmcache.store.store import DiskStore
store = DiskStore(DiskConfig(path=sys.argv[1], disk_bytes=1 << 24), SystemClock())
for i in range(10**9):
    key = b"%d" % i
    assert store.put(key, random.Random(key).randbytes({_WRITTEN_BYTES}))
    print(i, flush=True)
"""


def content(key: bytes, size: int = SIZE) -> bytes:
    """An object's bytes follow from its key."""
    return random.Random(key).randbytes(size)


def get(store: DiskStore, key: bytes, size: int = SIZE) -> bytes | None:
    buffer = bytearray(size)
    return bytes(buffer) if store.read_into(key, memoryview(buffer)) else None


class Hammer:
    """Mixed operations from many threads; each checks the budgets."""

    KEYS = 200
    DISK = 60 * SIZE

    def __init__(self, path: Path) -> None:
        self.clock = VirtualClock()
        config = DiskConfig(path=str(path), disk_bytes=self.DISK, disk_ttl_s=50.0)
        self.store = DiskStore(config, self.clock)
        self._contents = {key: content(key) for key in map(_name, range(self.KEYS))}
        self.problems: list[str] = []
        self.hits = 0

    def run(self, threads: int, operations: int) -> None:
        """Raises AssertionError for a deadlock; all else is in `problems`."""
        workers = [
            threading.Thread(target=self._guarded, args=(i, operations // threads))
            for i in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=_JOIN_TIMEOUT_S)
            assert not worker.is_alive(), "deadlock"

    def _guarded(self, seed: int, operations: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(operations):
                self._one(rng)
        except Exception as error:  # noqa: BLE001 - told to the main thread
            self.problems.append(repr(error))

    def _one(self, rng: random.Random) -> None:
        key = _name(rng.randrange(self.KEYS))
        choice = rng.random()
        if choice < 0.35:
            self.store.put(key, self._contents[key])
        elif choice < 0.8:
            self._read(key)
        elif choice < 0.9:
            self.store.delete([key])
        else:
            self.clock.advance(rng.random() * 0.2)
            self.store.sweep()
        if self.store.used_bytes > self.DISK:
            self.problems.append("disk budget")

    def _read(self, key: bytes) -> None:
        locked = self.store.lock([key])[0]
        found = get(self.store, key)
        if locked:
            self.store.unlock([key])
        if found is not None:
            self.hits += 1
            if found != self._contents[key]:
                self.problems.append(f"wrong bytes for {key!r}")


def _name(number: int) -> bytes:
    return b"%d" % number


@dataclass(slots=True)
class Survival:
    """What was found after all kills."""

    stored: int = 0
    found: int = 0
    problems: list[str] = field(default_factory=list)


def survive_kills(folder: Path, kills: int, seed: int) -> Survival:
    """After each kill every object that was reported stored is whole."""
    rng = random.Random(seed)
    seen = Survival()
    for _ in range(kills):
        last = _write_and_kill(folder, rng.randrange(1, _MAX_WRITES))
        store = DiskStore(
            DiskConfig(path=str(folder), disk_bytes=1 << 24), VirtualClock()
        )
        seen.stored += last + 1
        for key in map(_name, range(last + 1)):
            if get(store, key, _WRITTEN_BYTES) != content(key, _WRITTEN_BYTES):
                seen.problems.append(f"{key!r} was stored and is not there")
        for header in store.headers():
            seen.found += 1
            whole = content(header.key, _WRITTEN_BYTES)
            if get(store, header.key, _WRITTEN_BYTES) != whole:
                seen.problems.append(f"wrong bytes for {header.key!r}")
        if list(folder.glob("??/*.writing")):
            seen.problems.append("a temporary file stayed")
        store.close()
        for path in folder.glob("??/*.kv"):
            path.unlink()
    return seen


def _write_and_kill(folder: Path, writes: int) -> int:
    """The number of the last object that the killed process reported stored."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(folder)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    last = -1
    for _ in range(writes):
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    return last


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How long it is hammered, and how often killed."""

    operations: int = option(1_000_000, "", min=0)
    threads: int = option(8, "", min=1)
    kills: int = option(50, "", min=0)
    seed: int = option(7, "")


def lmcache_store(options: StoreOptions, console: Console) -> int:
    """The LMCache plugins' store: mixed operations from threads, then SIGKILLs."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.operations:
            hammer = Hammer(Path(folder, "hammered"))
            hammer.run(options.threads, options.operations)
            problems += hammer.problems
            console.print(
                f"{options.operations} operations from {options.threads} threads: "
                f"{hammer.hits} hits, {len(hammer.problems)} problems"
            )
        if options.kills:
            survival = survive_kills(Path(folder, "kills"), options.kills, options.seed)
            problems += survival.problems
            console.print(
                f"{options.kills} SIGKILLs: {survival.stored} objects reported stored, "
                f"{survival.found} found, {len(survival.problems)} problems"
            )
    for problem in problems[:10]:
        console.print(problem, markup=False)
    return 1 if problems else 0
