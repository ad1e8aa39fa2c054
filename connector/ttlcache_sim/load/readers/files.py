"""Logs from paths: files and folders, plain, gzip or zstd, JSON or other text."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ttlcache_sim.load.traces import Log, Record, TraceError

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
#: Our recordings go on in another file; OpenHands writes one an event.
_RUN_FILE = re.compile(r"(events-.+)-\d+\.jsonl")
_EVENT_FILE = re.compile(r"(event-)?\d+.*\.json")


def logs_in(path: Path) -> list[list[Path]]:
    """The files of a path, those of one log together.

    Raises:
        TraceError: no such path.
    """
    if path.is_file():
        return [[path]]
    if not path.is_dir():
        raise TraceError(f"{path}: no such file or folder")
    groups: dict[Path, list[Path]] = {}
    for each in sorted(path.rglob("*"), key=_in_order):
        if each.is_file() and not each.name.startswith("."):
            groups.setdefault(_log_of(each), []).append(each)
    return list(groups.values())


def _in_order(path: Path) -> tuple[Path, int, Path]:
    number = re.search(r"\d+", path.name) if _EVENT_FILE.fullmatch(path.name) else None
    return path.parent, int(number[0]) if number else 0, path


def _log_of(path: Path) -> Path:
    if run := _RUN_FILE.fullmatch(path.name):
        return path.with_name(run[1])
    if path.parent.name == "events" and _EVENT_FILE.fullmatch(path.name):
        return path.parent.parent
    return path.parent if path.name == "base_state.json" else path


def read_log(files: Sequence[Path]) -> Log:
    """
    Raises:
        TraceError: a file that cannot be read, or a line after the first that is not
            JSON. The last one may be cut off: it is still being written.
    """
    if len(files) == 1:
        return _read(files[0])
    records = [record for path in files for record in _read(path).records]
    home = files[0].parent
    return Log(home.parent if home.name == "events" else home, records)


def _read(path: Path) -> Log:
    text = _text(path).removeprefix("\ufeff")
    lines = text.split("\n")
    numbered = [(n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not numbered or numbered[0][1].lstrip()[0] not in "{[":
        return Log(path, lines=lines)
    try:
        first = json.loads(numbered[0][1])
    except ValueError:
        return _document(path, text, lines)
    except RecursionError:
        raise TraceError(f"{path}: nested too deep") from None
    if isinstance(first, list) and len(numbered) == 1:
        return Log(path, _items(path, first))
    records = (_record(path, number, line, len(lines)) for number, line in numbered)
    return Log(path, [record for record in records if record is not None])


def _document(path: Path, text: str, lines: list[str]) -> Log:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return Log(path, (), lines, f"{path}:{error.lineno}: not JSON: {error.msg}")
    items = value if isinstance(value, list) else [value]
    return Log(path, _items(path, items))


def _items(path: Path, values: list[Any]) -> list[Record]:
    return [Record(str(path), value) for value in values if isinstance(value, dict)]


def _record(path: Path, number: int, line: str, num_lines: int) -> Record | None:
    where = f"{path}:{number}"
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        if number == num_lines:
            return None
        raise TraceError(f"{where}: not JSON: {error.msg}") from None
    if not isinstance(value, dict):
        raise TraceError(f"{where}: expected a JSON object, got {line[:80]}")
    return Record(where, value)


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    if content.startswith(_ZSTD):
        content = _unpack_zstd(path, content)
    return content.decode(errors="replace")


def _unpack_zstd(path: Path, content: bytes) -> bytes:
    try:
        zstandard = import_module("zstandard")
    except ImportError:
        raise TraceError(f"{path}: is zstd: pip install zstandard") from None
    with zstandard.ZstdDecompressor().stream_reader(content) as stream:
        unpacked: bytes = stream.read()
    return unpacked
