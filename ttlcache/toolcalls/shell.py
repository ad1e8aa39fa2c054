"""The gap key of a shell command: which known program will dominate its time.

The last command that is not instant counts (cd, ls, grep, ... are); without one, the
last that is no prefix (cd, export, echo, ...); else the last. One put into the
background is instant. What runs another command (timeout, sudo, uv run, bash -c, ...)
is looked through. No word of a key comes from the command itself, which may hold
secrets: all are in `PROGRAMS`, and what is not there is `OTHER`.

Not a shell: enough of its grammar to see which programs run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from enum import IntEnum

from ttlcache.toolcalls.base import words
from ttlcache.types import FINAL_GAP, GapKey

#: Every program that is not in `PROGRAMS`.
OTHER = "*"
#: Characters of a script, and words of a command, that are looked at.
MAX_SCRIPT = 32 * 1024
MAX_WORDS = 64
_MAX_NESTING = 3  # bash -c "bash -c ..."

#: These prepare a command or report on it; any other command outranks them.
_PREFIXES = words(
    """cd pushd popd export set unset source . alias shopt ulimit umask eval trap
    true false : declare local deactivate echo printf return exit break continue"""
)
#: These end within a fraction of a second as a rule: only alone do they count.
_INSTANT = words(
    """ls ll cat head tail grep egrep fgrep rg ag find fd sed awk gawk wc pwd which
    whereis whoami id type command mkdir rmdir rm cp mv touch chmod chown ln nl od
    file stat date env printenv uname hostname sort uniq cut tr tee diff cmp xxd
    hexdump strings basename dirname realpath readlink test [ [[ tree du df ps kill
    pkill jobs history clear less more md5sum sha256sum seq column jq paste read
    nproc free yes git"""
)
_SHELLS = words("bash sh zsh dash")
#: These run the command among their arguments.
_WRAPPERS = words(
    """sudo doas sshpass timeout gtimeout time nohup exec builtin setsid unbuffer
    xvfb-run env nice ionice stdbuf taskset xargs npx bunx uvx"""
)
#: These do so after `run` or `exec`.
_RUNNERS = words(
    """uv poetry pipenv pdm rye hatch pipx conda mamba micromamba coverage bundle
    pnpm docker podman docker-compose"""
)
PROGRAMS = (_PREFIXES | _INSTANT | _SHELLS | _WRAPPERS | _RUNNERS) | words(
    """python pypy ipython jupyter pip pytest py.test tox nox ruff mypy pyright
    pylint flake8 black isort pre-commit sphinx-build django-admin alembic uvicorn
    gunicorn node npm yarn bun deno tsc ts-node tsx eslint prettier jest mocha
    vitest vite webpack next playwright cypress make cmake ctest ninja meson bazel
    gcc g++ cc c++ clang clang++ ld gdb lldb valgrind cargo rustc rustup go gofmt
    java javac mvn mvnw gradle gradlew ant sbt kotlinc scala dotnet ruby rake rspec
    gem perl php composer phpunit Rscript julia lua swift zig ghc cabal stack elixir
    mix apt apt-get apt-cache dpkg apk yum dnf brew pacman snap curl wget ssh scp
    rsync ping nc openssl gpg kubectl helm minikube terraform ansible
    ansible-playbook aws gcloud az gh psql mysql sqlite3 mongosh redis-cli
    redis-server pg_ctl pg_dump dbt tar zip unzip gzip gunzip xz bzip2 zstd dd sleep
    wait watch systemctl service ffmpeg convert pdflatex pandoc tmux nvidia-smi nvcc
    qemu-img vi vim nano emacs expect yt-dlp protoc patch man"""
)
#: Words of the shell's own grammar before a command, and those that start none.
_KEYWORDS = words("do then else if elif while until ! { }")
_HEADERS = words("for select case done fi esac function in")
# Echoed on a line of its own, these end a mini-swe-agent program.
_FINAL_MARKERS = words(
    "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT MINI_SWE_AGENT_FINAL_OUTPUT"
)

_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r]|\\\r?\n)++)
      | (?P<heredoc>\d?<<-?[ \t]*+
          (?P<tag>'[^'\n]{1,64}'|"[^"\n]{1,64}"|\\?[\w.!-]{1,64}))
      | (?P<redirect>\d{0,4}(?:<<<|&>>?|<>|>>|>\||>&|<&|<|>))
      | (?P<op>&&|\|[|&]?|;;?|[&\n()])
      | (?P<word>(?:'[^']*+'|"[^"\\]*+(?:\\.[^"\\]*+)*+"|`[^`]*+`|\$\([^()]*+\)?+
          |\\.|[^\s'"\\`$|&;()<>]++|[^\s|&;()<>])++)
      | .""",
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(r"""\$?'([^']*+)'|\$?"((?:[^"\\]|\\.)*+)"|\\(.)""", re.DOTALL)
_ESCAPED = re.compile(r"""\\(["\\$`])""")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^]]*\])?\+?=")
_KEYSTROKE = re.compile(r"(?:[CMS]-.{1,6}|\^.)$")  # of a terminal: C-c


class _Rank(IntEnum):
    PREFIX = 0
    INSTANT = 1
    REAL = 2
    FINAL = 3


_Found = tuple[_Rank, str]


def shell_key(command: str, tool: str = "bash") -> GapKey:
    """The gap key of `command` run by `tool`; `tool` alone where nothing runs.

    Linear time; never raises, whatever the quoting.

    Args:
        tool: as `tool_names.tool_name` gives it.
    """
    found = _dominating(command, nesting=0)
    if found is None:
        return GapKey(tool)
    rank, program = found
    return FINAL_GAP if rank is _Rank.FINAL else GapKey(tool, program)


def is_quick(program: str) -> bool:
    """Whether it ends within a fraction of a second as a rule."""
    return program in _PREFIXES or program in _INSTANT


def _dominating(script: str, nesting: int) -> _Found | None:
    """The last of the highest rank."""
    best: _Found | None = None
    for command, in_background in _commands(script[:MAX_SCRIPT]):
        found = _of_command(command, nesting)
        if found and in_background:
            found = min(found[0], _Rank.INSTANT), found[1]
        if found and (best is None or found[0] >= best[0]):
            best = found
    return best


def _of_command(command: list[str], nesting: int) -> _Found | None:
    command = list(
        itertools.dropwhile(lambda w: _ASSIGNMENT.match(w) or w in _KEYWORDS, command)
    )
    name = _program(command[0]) if command and command[0] not in _HEADERS else ""
    arguments = command[1:]
    if name in _SHELLS:
        for flag, script in itertools.pairwise(arguments):
            if flag.startswith("-") and flag.endswith("c"):
                is_deep = nesting == _MAX_NESTING
                return None if is_deep else _dominating(script, nesting + 1)
    if name in _WRAPPERS or (name in _RUNNERS and _runs_command(arguments)):
        for index, word in enumerate(arguments):
            if _program(word) in PROGRAMS:
                return _of_command(arguments[index:], nesting)
    if name == "python" and "-m" in arguments[:-1]:
        module = arguments[arguments.index("-m") + 1]
        name = module if module in PROGRAMS else name
    return (_rank(name, arguments), name) if name else None


def _runs_command(arguments: list[str]) -> bool:
    return not {"run", "exec"}.isdisjoint(arguments[:2])


def _rank(program: str, arguments: list[str]) -> _Rank:
    if program == "echo" and not _FINAL_MARKERS.isdisjoint(arguments):
        return _Rank.FINAL
    if program in _PREFIXES:
        return _Rank.PREFIX
    return _Rank.INSTANT if program in _INSTANT else _Rank.REAL


def _program(word: str) -> str:
    """Of `PROGRAMS`, or `OTHER`; empty where the word names none."""
    name = word.rstrip("/").rpartition("/")[2].partition("@")[0]  # npx tool@1.2
    if name.endswith((".py", ".sh")):
        return "python" if name.endswith("y") else "bash"
    without_version = name.rstrip("0123456789.").removesuffix("-")
    for known in (name, without_version):
        if known in PROGRAMS:
            return known
    return OTHER if word.strip("/") and not _KEYSTROKE.match(word) else ""


def _commands(script: str) -> Iterator[tuple[list[str], bool]]:
    """The simple commands in order, and which are put into the background."""
    command, tags, is_target, pos = list[str](), list[str](), False, 0
    while match := _TOKEN.match(script, pos):
        kind, token, pos = match.lastgroup, match[0], match.end()
        if kind == "word" and token.startswith("#"):
            pos = _line_end(script, pos)
        elif kind == "word":
            if not is_target and len(command) < MAX_WORDS:
                command.append(_QUOTED.sub(_unquote, token))
            is_target = False
        elif kind == "heredoc":
            tags.append(match["tag"].strip("'\"\\"))
        elif kind == "redirect":
            is_target = True  # the next word is where it goes
        elif kind == "op":
            yield command, token == "&"
            command, is_target = [], False
            if token == "\n":
                pos, tags = _heredocs_end(script, pos, tags), []
    yield command, False


def _heredocs_end(script: str, pos: int, tags: list[str]) -> int:
    """The line after the last body; `pos` is the start of a line."""
    for tag in tags:
        is_closed = False
        while pos < len(script) and not is_closed:
            end = _line_end(script, pos)
            is_closed, pos = script[pos:end].strip() == tag, end + 1
    return pos


def _line_end(script: str, pos: int) -> int:
    end = script.find("\n", pos)
    return end if end >= 0 else len(script)


def _unquote(quoted: re.Match[str]) -> str:
    plain, double, escaped = quoted.groups()
    if double is not None:
        return _ESCAPED.sub(r"\1", double)
    return plain if plain is not None else escaped
