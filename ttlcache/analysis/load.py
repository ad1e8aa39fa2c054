"""Finds and reads a recording, ttlcache's or vllm-continuum's."""

from __future__ import annotations

from pathlib import Path

from ttlcache.analysis import continuum_format
from ttlcache.analysis.reader import Reader
from ttlcache.analysis.recording import Recording, RecordingError


def load(place: Path) -> Recording:
    """A recording: its folder, one of its files, or vllm-continuum's file.

    Raises:
        RecordingError: nothing of either kind is there.
    """
    if place.is_dir():
        files = sorted(place.glob("events-*.jsonl"))
        foreign = place / continuum_format.FILE_NAME
        if not files and foreign.is_file():
            return continuum_format.load(foreign)
    else:
        files = [place]
        if place.is_file() and continuum_format.is_one(place):
            return continuum_format.load(place)
    if not files or not all(path.is_file() for path in files):
        raise RecordingError(
            f"{place}: expected a folder with events-*.jsonl (record_path), one such "
            f"file, or vllm-continuum's {continuum_format.FILE_NAME}"
        )
    reader = Reader()
    for path in files:
        reader.read(path)
    if not reader.runs:
        raise RecordingError(f"{place}: no recording of ttlcache in it")
    return reader.result()
