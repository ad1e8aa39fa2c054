"""Gap histories on disk, so that a restarted server does not start cold.

One small JSON file. It is a cache of statistics: whatever is wrong with it costs a
cold start and a line in the log, never an exception in the server.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from ttlcache.estimators.gap_history import MAX_GAP_S, GapHistory, GapRecords
from ttlcache.types import GapKey

logger = logging.getLogger(__name__)

FORMAT = "ttlcache-gaps"
#: Keys of version 1 may hold words of the commands that models wrote.
VERSION = 2
#: What is saved: the freshest keys and of each its freshest gaps, which keeps the
#: file under about 4 MB. Statistics need hundreds of records, not all of them.
MAX_KEYS = 1024
MAX_RECORDS = 256
MAX_GLOBAL_RECORDS = 10_000
#: A larger file is not one of ours and is not read.
MAX_FILE_BYTES = 16 * 1024 * 1024


class _NotOurs(ValueError):
    """The file's content is not what `save` writes."""


def save(history: GapHistory, path: str | os.PathLike[str]) -> bool:
    """Write the completed and censored gaps of `history`, replacing the file at once.

    Open gaps are not written: their start means nothing to another clock. False,
    and a warning, where the file cannot be written; the old one is then untouched.
    """
    return write(snapshot(history), path)


def snapshot(history: GapHistory) -> list[GapRecords]:
    """Copies of what `save` keeps, so that another thread can write them while gaps
    go on coming. About two microseconds a key.
    """
    return list(islice(history.export(MAX_RECORDS, MAX_GLOBAL_RECORDS), MAX_KEYS + 1))


def write(
    windows: Iterable[GapRecords],
    path: str | os.PathLike[str],
    pause: Callable[[], object] = lambda: None,
) -> bool:
    """Write a snapshot; like `save` but for the copy.

    Args:
        pause: called after every window. Encoding one holds Python's global lock for
            some 100 microseconds; a writer in the background sleeps here.
    """
    target = Path(path)
    try:
        _replace(target, _pieces(windows, pause))
    except OSError as error:
        logger.warning("gap history not saved to %s: %s", target, error)
        return False
    return True


def _pieces(
    windows: Iterable[GapRecords], pause: Callable[[], object]
) -> Iterator[str]:
    yield f'{{"format":"{FORMAT}","version":{VERSION},"windows":['
    for index, records in enumerate(windows):
        yield "," if index else ""
        yield json.dumps(_encode(records), separators=(",", ":"))
        pause()
    yield "]}"


def _replace(target: Path, pieces: Iterable[str]) -> None:
    # A file of its own in the same folder: two servers never share a half-written
    # one, and the rename is atomic.
    handle, name = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.name}.", suffix=".tmp"
    )
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _encode(records: GapRecords) -> dict[str, object]:
    key = records.key
    return {
        "key": None if key is None else [key.tool, key.executable, key.second],
        # Microseconds are finer than any gap is measured.
        "gaps_s": [round(gap_s, 6) for gap_s in records.gaps_s],
        "completed": "".join("1" if c else "0" for c in records.completed),
    }


def load(path: str | os.PathLike[str], history: GapHistory | None = None) -> GapHistory:
    """The saved history, read into `history` (a new one with defaults if None).

    A missing file leaves it as it is, silently: the first start. So does any other
    trouble, with a warning; a file that is wrong anywhere is not used in part.
    """
    into = history if history is not None else GapHistory()
    source = Path(path)
    try:
        windows = _read(source)
    except FileNotFoundError:
        logger.debug("no gap history at %s", source)
        return into
    # ValueError covers bad JSON, bad UTF-8 and _NotOurs; RecursionError deep nesting.
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("gap history %s ignored: %s", source, error)
        return into
    # Oldest key first, so that the freshest is the last to be forgotten.
    for records in reversed(windows):
        into.restore(records)
    return into


def _read(source: Path) -> list[GapRecords]:
    with source.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise _NotOurs(f"larger than {MAX_FILE_BYTES} bytes")
    state = json.loads(content)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise _NotOurs(f"not a {FORMAT} file")
    if state.get("version") != VERSION:
        raise _NotOurs(f"version {state.get('version')!r}, expected {VERSION}")
    windows = state.get("windows")
    if not isinstance(windows, list) or len(windows) > MAX_KEYS + 1:
        raise _NotOurs("no usable list of windows")
    return [_decode(window) for window in windows]


def _decode(window: object) -> GapRecords:
    if not isinstance(window, dict):
        raise _NotOurs("a window is not an object")
    gaps_s, completed = window.get("gaps_s"), window.get("completed")
    if not isinstance(gaps_s, list) or not isinstance(completed, str):
        raise _NotOurs("a window without records")
    if len(gaps_s) != len(completed) or not set(completed) <= {"0", "1"}:
        raise _NotOurs("records and their marks differ")
    return GapRecords(
        _decode_key(window.get("key")),
        [_decode_gap(gap_s) for gap_s in gaps_s],
        [mark == "1" for mark in completed],
    )


def _decode_key(parts: object) -> GapKey | None:
    if parts is None:
        return None
    if not isinstance(parts, list) or len(parts) != 3:
        raise _NotOurs(f"key {parts!r}")
    if not all(isinstance(part, str) for part in parts):
        raise _NotOurs(f"key {parts!r}")
    return GapKey(*parts)


def _decode_gap(gap_s: object) -> float:
    # bool is an int to Python, and JSON as Python reads it has NaN and Infinity.
    if isinstance(gap_s, bool) or not isinstance(gap_s, int | float):
        raise _NotOurs(f"gap {gap_s!r}")
    try:
        value = float(gap_s)
    except OverflowError:
        raise _NotOurs("a gap beyond all floats") from None
    if not 0.0 <= value <= MAX_GAP_S:  # false for NaN, too
        raise _NotOurs(f"gap {gap_s!r}")
    return value
