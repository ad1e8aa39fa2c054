"""Events to disk without a wait: JSON lines, written behind the engine's back.

`put` appends one tuple to a bounded queue. A thread of its own encodes and writes
what has gathered, several times a second and unbuffered, so that a killed process
loses that fraction of a second and nothing else. A full queue drops events and
counts them; a full disk stops the recording, never the engine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

#: (seconds of the engine's clock, kind, values in the order of EVENTS[kind]).
Event = tuple[float, str, tuple[Any, ...]]
FORMAT = "ttlcache-events"
VERSION = 1
FLUSH_S = 0.25
MAX_PENDING = 100_000
MAX_FILE_BYTES = 64 * 1024 * 1024
#: Files kept in the folder, the runs before this one included.
MAX_FILES = 16
#: Events encoded in one go; between two goes the engine's thread may run.
_BATCH = 64
#: `json.dumps` with arguments would make an encoder for every event.
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


class Recorder:
    """A bounded queue in front of rotating files `events-<run>-<number>.jsonl`.

    Args:
        folder: made if it is missing.
        fields: names of the values of each kind of event.
        header: goes into the first line of every file.
        run: tells runs in one folder apart.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        fields: Mapping[str, Sequence[str]],
        header: Mapping[str, Any],
        run: str,
        *,
        max_pending: int = MAX_PENDING,
        max_file_bytes: int = MAX_FILE_BYTES,
        max_files: int = MAX_FILES,
        flush_s: float = FLUSH_S,
    ) -> None:
        self._folder = folder
        self._fields = fields
        self._header = {"ev": "start", "format": FORMAT, "version": VERSION, **header}
        self._run = run
        self._queue: deque[Event] = deque()
        self._max_pending = max_pending
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files
        self._number = 0
        self._file: Any = None
        self._file_bytes = 0
        self._lock = threading.Lock()  # of the files, never taken by `put`
        self._stop = threading.Event()
        self._broken = False
        self.dropped = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._open()
        self._flush_s = flush_s
        self._thread = threading.Thread(
            target=self._work, name="ttlcache-recorder", daemon=True
        )
        self._thread.start()

    def put(self, now_s: float, kind: str, values: tuple[Any, ...]) -> None:
        """Queue one event: the only call on the engine's thread."""
        if len(self._queue) < self._max_pending:
            self._queue.append((now_s, kind, values))
        else:
            self.dropped += 1

    @property
    def pending(self) -> int:
        return len(self._queue)

    @property
    def thread_ident(self) -> int | None:
        """The writing thread, for those who measure it."""
        return self._thread.ident

    def flush(self) -> None:
        """Write everything queued so far."""
        with self._lock:
            left = len(self._queue)  # what comes meanwhile waits for the next time
            while left > 0 and not self._broken:
                self._write_batch()
                left -= _BATCH
            if self._broken:
                self.dropped += len(self._queue)
                self._queue.clear()

    def close(self) -> None:
        """Write the rest and end; events that come later are dropped."""
        self._stop.set()
        self._thread.join(timeout=5.0)
        self.flush()
        with self._lock:
            self._max_pending = 0
            if self._file is not None:
                self._file.close()
                self._file = None
            self._broken = True

    def _work(self) -> None:
        while not self._stop.wait(self._flush_s):
            self.flush()

    def _write_batch(self) -> None:
        lines: list[str] = []
        while self._queue and len(lines) < _BATCH:
            event = self._queue.popleft()
            try:
                lines.append(self._encode(event))
            except (TypeError, ValueError, KeyError):
                self.dropped += 1  # no JSON, or no event of ours
        data = "".join(lines).encode()
        try:
            if self._file_bytes + len(data) > self._max_file_bytes:
                self._open()
            self._file.write(data)
            self._file_bytes += len(data)
        except OSError as error:
            self._broken = True
            logger.warning("recording into %s stopped: %s", self._folder, error)

    def _encode(self, event: Event) -> str:
        now_s, kind, values = event
        line = {"t": round(now_s, 6), "ev": kind}
        line.update(zip(self._fields[kind], values, strict=True))
        return _encode(line) + "\n"

    def _open(self) -> None:
        if self._file is not None:
            self._file.close()
        path = self._folder / f"events-{self._run}-{self._number:05d}.jsonl"
        self._number += 1
        # Unbuffered: what was written is the kernel's, whatever happens to us.
        self._file = path.open("ab", buffering=0)
        head = json.dumps(self._header, default=str) + "\n"
        self._file.write(head.encode())
        self._file_bytes = len(head)
        self._prune()

    def _prune(self) -> None:
        """Forget the oldest files, so that the folder stays bounded."""
        found = sorted(self._folder.glob("events-*.jsonl"), key=_modified_s)
        for path in found[: max(0, len(found) - self._max_files)]:
            with contextlib.suppress(OSError):
                path.unlink()


def _modified_s(path: Path) -> tuple[float, str]:
    try:
        return os.stat(path).st_mtime, path.name
    except OSError:
        return 0.0, path.name
