"""The gap key of a shell command: which program will dominate its time.

Rules, in order:
1. Of a script, the last command that is not instant counts (cd, ls, grep, ... are);
   without one, the last that is no prefix (cd, export, echo, ...); else the last.
   A command put into the background is instant.
2. Of a pipeline, the first stage of the highest of these ranks.
3. Wrappers (timeout, sudo, env, uv run, docker exec, bash -c, ...) are looked
   through; `python -m x` is the program x; python3.11 is python, gcc-12 is gcc.
4. The second word is a subcommand, or for a file its extension (`*.py`).
5. No word of a key comes from the command itself, which may hold secrets: all are in
   the tables of `shell_names`. Scripts are known by extension, other programs by `*`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from ttlcache.toolcalls.shell.lexer import Pipeline, split_script
from ttlcache.toolcalls.shell.names import EXTENSIONS, OTHER, PROGRAMS, SUBCOMMANDS
from ttlcache.toolcalls.shell.programs import (
    HEADERS,
    INSTANT,
    KEYWORDS,
    MODE_FLAGS,
    NO_SUBCOMMAND,
    PREFIX_PAIRS,
    PREFIXES,
    SCRIPT_RUNNERS,
    SHELLS,
    SLOW_GIT,
    VALUE_FLAGS,
    WRAPPERS,
    Wrapper,
)
from ttlcache.types import FINAL_GAP, GapKey

_MAX_NESTING = 3  # bash -c "bash -c ..."
_MAX_WRAPPERS = 8
# Echoed on a line of its own, these end a mini-swe-agent program.
_FINAL_MARKERS = frozenset(
    {"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "MINI_SWE_AGENT_FINAL_OUTPUT"}
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^]]*\])?\+?=")
_VERSION = re.compile(r"-?\d[\d.]*$")
_TMUX_KEY = re.compile(r"(?:[CMS]-.{1,6}|\^.)$")
_EXTENSION = re.compile(
    r"[^=]*[\w\])}*-](\.[A-Za-z][A-Za-z0-9]{0,4})(?:::.*)?$", re.DOTALL
)


class _Rank(IntEnum):
    PREFIX = 0
    INSTANT = 1
    REAL = 2
    FINAL = 3


@dataclass(frozen=True, slots=True)
class _Program:
    rank: _Rank
    executable: str
    second: str = ""


def shell_key(command: str, tool: str = "bash") -> GapKey:
    """The gap key of `command` run by `tool`; `tool` alone where nothing runs.

    Linear time; never raises, whatever the quoting.

    Args:
        tool: as `tool_names.tool_name` gives it.
    """
    program = _dominating(command, depth=0)
    if program is None:
        return GapKey(tool)
    if program.rank is _Rank.FINAL:
        return FINAL_GAP
    return GapKey(tool, program.executable, program.second)


def _dominating(script: str, depth: int) -> _Program | None:
    """The last of the highest rank."""
    if depth > _MAX_NESTING:
        return None
    found = [_of_pipeline(pipeline, depth) for pipeline in split_script(script)]
    return _first_of_highest_rank(reversed(found))


def _of_pipeline(pipeline: Pipeline, depth: int) -> _Program | None:
    stages = (_of_command(words, depth) for words in pipeline.stages)
    chosen = _first_of_highest_rank(stages)
    if chosen and pipeline.background:
        return replace(chosen, rank=min(chosen.rank, _Rank.INSTANT))
    return chosen


def _first_of_highest_rank(found: Iterable[_Program | None]) -> _Program | None:
    return max(filter(None, found), key=lambda program: program.rank, default=None)


def _of_command(words: list[str], depth: int) -> _Program | None:
    words = _unwrap(words)
    if not words or words[0] in HEADERS:
        return None
    executable, arguments = _executable(words[0]), words[1:]
    if executable in SHELLS and (script := _inline_script(arguments)) is not None:
        return _dominating(script, depth + 1)
    module = _module_call(arguments) if executable == "python" else None
    if module and module[0] in PROGRAMS:
        executable, arguments = module[0], module[1:]
    elif module:
        return _Program(_Rank.REAL, executable, "-m")
    elif executable == "*.py":
        executable, arguments = "python", words
    if not executable or _TMUX_KEY.match(words[0]):
        return None
    return _program(executable, arguments)


def _program(executable: str, arguments: list[str]) -> _Program:
    second = _second(executable, arguments)
    rank = _Rank.REAL
    if executable == "echo" and not _FINAL_MARKERS.isdisjoint(arguments):
        rank = _Rank.FINAL
    elif executable in PREFIXES or (executable, second) in PREFIX_PAIRS:
        rank = _Rank.PREFIX
    elif executable in INSTANT or (executable == "git" and second not in SLOW_GIT):
        rank = _Rank.INSTANT
    return _Program(rank, executable, second)


def _unwrap(words: list[str]) -> list[str]:
    """The words without what stands before the program itself."""
    for _ in range(_MAX_WRAPPERS):
        words = _drop_assignments(words)
        inner = _drop_wrapper(words)
        # `sudo -l`, `env`, `time`: the wrapper is what runs.
        if inner is None or not inner:
            return words
        words = inner
    return words


def _drop_assignments(words: list[str]) -> list[str]:
    return list(
        itertools.dropwhile(lambda w: _ASSIGNMENT.match(w) or w in KEYWORDS, words)
    )


def _drop_wrapper(words: list[str]) -> list[str] | None:
    """The command that a wrapper runs; None where there is no wrapper."""
    if not words:
        return None
    names = (_executable(words[0]), *words[1:3])
    for length in (3, 2, 1):
        wrapper = WRAPPERS.get(names[:length])
        if wrapper is not None:
            return _after_options(words[length:], wrapper)
    return None


def _after_options(words: list[str], wrapper: Wrapper) -> list[str]:
    start, positionals = 0, wrapper.positionals
    while start < len(words):
        word = words[start]
        if word == "-m":  # coverage run -m pytest, uv run -m pytest
            return ["python", *words[start:]]
        if word in wrapper.value_flags:
            start += 2
        elif word.startswith("-") and word != "-":
            start += 1
        elif positionals:
            positionals, start = positionals - 1, start + 1
        else:
            break
    return words[start:]


def _executable(word: str) -> str:
    """The program's name in `PROGRAMS`, `*.sh` for a script, else `OTHER`."""
    name = word.rstrip("/").rpartition("/")[2]
    if "@" in name:  # npx tool@1.2
        name = name.partition("@")[0]
    for known in (name, _VERSION.sub("", name)):
        if known in PROGRAMS:
            return known
    return (_extension(name) or OTHER) if name else ""


def _extension(word: str) -> str:
    """`*.py` of the name of a file; empty where it has no extension of `EXTENSIONS`."""
    match = _EXTENSION.match(word[:256])
    extension = match[1].lower() if match else ""
    return "*" + extension if extension[1:] in EXTENSIONS else ""


def _inline_script(arguments: list[str]) -> str | None:
    """The script of `bash -c script`, with -lc and other flags before it."""
    for index, word in enumerate(arguments[:-1]):
        if not word.startswith("-"):
            return None
        if word.endswith("c") and not word.startswith("--"):
            return arguments[index + 1]
    return None


def _module_call(arguments: list[str]) -> list[str]:
    """The words from `x` on of `python -W y -m x ...`; empty where no module runs."""
    skip = False
    for index, word in enumerate(arguments):
        if word == "-m":
            return arguments[index + 1 :]
        if not skip and not word.startswith("-"):
            break  # `python train.py -m x`: the flag belongs to the script
        skip = word in VALUE_FLAGS["python"]
    return []


def _second(executable: str, arguments: list[str]) -> str:
    value_flags = VALUE_FLAGS.get(executable, frozenset())
    modes = MODE_FLAGS.get(executable, frozenset())
    skip = False
    for word in arguments:
        if skip or word.isdigit():
            skip = False
        elif word in modes:
            return word
        elif word.startswith(("-", "+")):
            skip = word in value_flags
        elif executable in SCRIPT_RUNNERS and word in ("run", "run-script"):
            continue
        else:
            return _second_word(executable, word)
    return ""


def _second_word(executable: str, word: str) -> str:
    if executable not in PROGRAMS or "://" in word:
        return ""
    if extension := _extension(word):
        return extension
    subcommand = word.partition(":")[0]  # npm run test:unit
    known = executable not in NO_SUBCOMMAND and subcommand in SUBCOMMANDS
    return subcommand if known else ""
