"""Events to disk without a wait: JSON lines, written behind the engine's back.

`put` appends one tuple to a bounded queue. A thread of its own encodes and writes
what has gathered, several times a second and unbuffered, so that a killed process
loses that fraction of a second and nothing else. A full queue drops events and
counts them. While the disk is full events wait in the queue, and the recording goes on
once there is room.

Recordings tell what clients do and when: files are 0600, a new folder 0700.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

#: (seconds of the engine's clock, kind, fields by name).
Event = tuple[float, str, dict[str, Any]]
FORMAT = "ttlcache-events"
VERSION = 1
FLUSH_S = 0.25
MAX_PENDING = 100_000
MAX_FILE_BYTES = 64 * 1024 * 1024
#: Files kept in the folder, of all engines and runs; those being written stay anyway.
MAX_FILES = 16
# Exclusive: of an existing file, mode and owner could be anybody's.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
#: Events encoded in one go; between two goes the engine's thread may run.
_BATCH = 64
#: `json.dumps` with arguments would make an encoder for every event.
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


class Recorder:
    """A bounded queue in front of rotating files `events-<run>-<number>.jsonl`.

    Args:
        folder: made if it is missing.
        header: goes into the first line of every file.
        run: tells runs in one folder apart.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        header: Mapping[str, Any],
        run: str,
        *,
        max_pending: int = MAX_PENDING,
        max_file_bytes: int = MAX_FILE_BYTES,
        max_files: int = MAX_FILES,
        flush_s: float = FLUSH_S,
    ) -> None:
        self._folder = folder
        self._header = {"ev": "start", "format": FORMAT, "version": VERSION, **header}
        self._run = run
        self._queue: deque[Event] = deque()
        self._max_pending = max_pending
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files
        self._number = 0
        self._file: io.FileIO | None = None
        self._file_bytes = 0
        self._is_failing = False
        self._lock = threading.Lock()  # of the files, never taken by `put`
        self._stop = threading.Event()
        self.dropped = 0
        self._open()
        self._flush_s = flush_s
        self._thread = threading.Thread(
            target=self._work, name="ttlcache-recorder", daemon=True
        )
        self._thread.start()

    def put(self, now_s: float, kind: str, fields: dict[str, Any]) -> None:
        """Queue one event: the only call on the engine's thread."""
        if len(self._queue) < self._max_pending:
            self._queue.append((now_s, kind, fields))
        else:
            self.dropped += 1

    def flush(self) -> None:
        """Write everything queued so far, if the disk takes it."""
        with self._lock:
            left = len(self._queue)  # what comes meanwhile waits for the next time
            while left > 0:
                # By index: an iterator would end where `put` appends meanwhile.
                batch = [self._queue[i] for i in range(min(left, _BATCH))]
                lines = [line for event in batch if (line := _line_of(event))]
                if not self._write("".join(lines).encode()):
                    return
                for _ in batch:
                    self._queue.popleft()
                left -= len(batch)
                self.dropped += len(batch) - len(lines)

    def close(self) -> None:
        """Write the rest and end; events that come later are dropped."""
        self._stop.set()
        self._thread.join(timeout=5.0)
        self.flush()
        with self._lock:
            self._max_pending = 0
            self.dropped += len(self._queue)
            self._queue.clear()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _work(self) -> None:
        while not self._stop.wait(self._flush_s):
            self.flush()

    def _write(self, batch: bytes) -> bool:
        """False where the disk refused: its events stay in the queue."""
        if self._file is None:
            return False  # closed
        try:
            if self._file_bytes + len(batch) > self._max_file_bytes:
                self._open()
            _append(self._file, batch)
        except OSError as error:
            if not self._is_failing:
                logger.warning(
                    "recording into %s waits until it can be written: %s",
                    self._folder,
                    error,
                )
            self._is_failing = True
            return False
        if self._is_failing:
            logger.warning("recording goes on into %s", self._folder)
        self._is_failing = False
        self._file_bytes += len(batch)
        return True

    def _open(self) -> None:
        """Go on in a new file; the one before stays in use if that fails."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"events-{self._run}-{self._number:05d}.jsonl"
        handle = os.open(path, _FLAGS, 0o600)
        # Unbuffered: what was written is the kernel's, whatever happens to us.
        file = io.FileIO(handle, "wb")
        head = (json.dumps(self._header, default=str) + "\n").encode()
        try:
            # Tells other engines of the folder that this file is live; see `_prune`.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _append(file, head)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._file_bytes = file, len(head)
        self._number += 1
        self._prune()

    def _prune(self) -> None:
        """Forget the oldest files, so that the folder stays bounded."""
        found = sorted(self._folder.glob("events-*.jsonl"), key=_modified_s)
        for path in found[: max(0, len(found) - self._max_files)]:
            # An OSError: gone meanwhile, another user's, or locked by its engine.
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _line_of(event: Event) -> str:
    """Empty where it is no JSON."""
    now_s, kind, fields = event
    try:
        return _encode({"t": round(now_s, 6), "ev": kind, **fields}) + "\n"
    except (TypeError, ValueError):
        return ""


def _append(file: io.FileIO, data: bytes) -> None:
    """Append all of `data`, or nothing.

    Raises:
        OSError: the disk does not take it.
    """
    end = os.fstat(file.fileno()).st_size  # others may have truncated it
    try:
        view = memoryview(data)
        while view:  # a disk that becomes full takes a part first
            view = view[file.write(view) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


def _modified_s(path: Path) -> tuple[float, str]:
    try:
        return os.stat(path).st_mtime, path.name
    except OSError:
        return 0.0, path.name
