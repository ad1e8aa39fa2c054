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
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from ttlcache.estimators.gap_history import MAX_GAP_S, GapHistory, GapRecords
from ttlcache.types import GapKey

logger = logging.getLogger(__name__)

#: What is saved: the freshest keys and of each its freshest gaps, which keeps the
#: file under about 4 MB. Statistics need hundreds of records, not all of them.
MAX_KEYS = 1024
MAX_RECORDS = 256
MAX_GLOBAL_RECORDS = 10_000
#: A larger file is not one of ours and is not read.
MAX_FILE_BYTES = 16 * 1024 * 1024


class _Window(BaseModel):
    """`GapRecords` as it is written; completed: "1", or "0" for a gap cut off."""

    key: tuple[str, str] | None
    gaps_s: list[Annotated[float, Field(ge=0.0, le=MAX_GAP_S)]]
    completed: Annotated[str, Field(pattern="^[01]*$")]

    @model_validator(mode="after")
    def _every_gap_has_its_mark(self) -> Self:
        if len(self.gaps_s) != len(self.completed):
            raise ValueError("records and their marks differ")
        return self


class _File(BaseModel):
    format: Literal["ttlcache-gaps"]
    #: Keys of version 1 may hold words of the commands that models wrote, those of
    #: version 2 have three parts.
    version: Literal[3]
    windows: Annotated[list[_Window], Field(max_length=MAX_KEYS + 1)]


def snapshot(history: GapHistory) -> list[GapRecords]:
    """Copies of what is saved, so that another thread can write them while gaps go on
    coming. About two microseconds a key.

    Open gaps are not saved: their start means nothing to another clock.
    """
    return list(islice(history.export(MAX_RECORDS, MAX_GLOBAL_RECORDS), MAX_KEYS + 1))


def write(
    windows: Iterable[GapRecords],
    path: str | os.PathLike[str],
    pause: Callable[[], object] = lambda: None,
) -> bool:
    """Write a snapshot, replacing the file at once.

    Args:
        pause: called after every window. Encoding one holds Python's global lock for
            some 100 microseconds; a writer in the background sleeps here.

    Returns:
        False, after a warning, where it cannot be written; the old one is untouched.
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
    yield '{"format":"ttlcache-gaps","version":3,"windows":['
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
        "key": None if key is None else list(key),
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
    except (OSError, ValueError) as error:
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
        raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
    try:
        state = _File.model_validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place}: {first['msg']}") from None
    return [
        GapRecords(
            None if window.key is None else GapKey(*window.key),
            window.gaps_s,
            [mark == "1" for mark in window.completed],
        )
        for window in state.windows
    ]
