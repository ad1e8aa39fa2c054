"""Splits a shell script into pipelines of simple commands.

Not a shell: enough of its grammar to see which programs run. Quotes are removed,
redirections, comments and heredoc bodies are dropped, substitutions stay unread.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

#: Characters of a script, and words of a command, that are looked at.
MAX_SCRIPT = 32 * 1024
MAX_WORDS = 64

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]++|\\\r?\n)
      | (?P<heredoc>\d*<<-?[ \t]*+
          (?P<tag>'[^'\n]{1,64}'|"[^"\n]{1,64}"|\\?[\w.!-]{1,64}))
      | (?P<redirect>\d{0,4}(?:<<<|<>|>>|>\||>&|<&|<|>)|&>>?)
      | (?P<op>&&|\|\||;;|\|&|[;|&\n()])
      | (?P<quoted>\$?'[^']*+'|\$?"[^"\\]*+(?:\\.[^"\\]*+)*+"|`[^`]*+`)
      | (?P<brace>\$\{[^}\n]{0,200}\})
      | (?P<subst>\$\()
      | (?P<escaped>\\.)
      | (?P<plain>[^\s'"\\$`|&;()<>]++|.)""",
    re.VERBOSE | re.DOTALL,
)
#: Kinds of tokens that make up words.
_PIECES = frozenset({"quoted", "brace", "subst", "escaped", "plain"})
_PAREN = re.compile(r"[()]")
_DOUBLE_ESCAPE = re.compile(r"""\\(["\\$`])""")


@dataclass(slots=True)
class Pipeline:
    """Simple commands connected by pipes; `background` when it ended in `&`."""

    stages: list[list[str]] = field(default_factory=list)
    background: bool = False


def split_script(script: str) -> list[Pipeline]:
    """The pipelines of `script` in order. Linear time; never raises."""
    return list(_pipelines(_tokens(script[:MAX_SCRIPT])))


def _pipelines(tokens: Iterable[tuple[str, str]]) -> Iterator[Pipeline]:
    pipeline, words, is_target = Pipeline(), list[str](), False
    for kind, token in itertools.chain(tokens, [("op", "\n")]):
        if kind == "redirect":
            is_target = True  # the next word is where it goes
            continue
        if kind == "op":
            if words:
                pipeline.stages.append(words)
                words = []
            if pipeline.stages and token not in ("|", "|&"):
                pipeline.background = token == "&"
                yield pipeline
                pipeline = Pipeline()
        elif not is_target and len(words) < MAX_WORDS:
            words.append(token)
        is_target = False


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of each word, without its quotes, redirection and operator."""
    word: str | None = None
    tags: list[str] = []  # of heredocs whose bodies begin on the next line
    pos = 0
    while match := _TOKEN.match(text, pos):
        kind, token, pos = match.lastgroup, match[0], match.end()
        if kind == "plain" and word is None and token.startswith("#"):
            pos = _line_end(text, pos)
        elif kind in _PIECES:
            if kind == "subst":
                pos = _substitution_end(text, pos)
                token = text[match.start() : pos]
            elif kind == "quoted":
                token = _unquote(token.lstrip("$"))
            elif kind == "escaped":
                token = token[1:]
            word = (word or "") + token
        else:
            if word is not None:
                yield "word", word
                word = None
            if kind == "heredoc":
                tags.append(match["tag"].strip("'\"\\"))
            elif kind in ("op", "redirect"):
                yield kind, token
            if token == "\n":
                pos, tags = _heredocs_end(text, pos, tags), []
    if word is not None:
        yield "word", word


def _line_end(text: str, pos: int) -> int:
    end = text.find("\n", pos)
    return len(text) if end < 0 else end


def _substitution_end(text: str, pos: int) -> int:
    depth = 1
    for paren in _PAREN.finditer(text, pos):
        depth += 1 if paren[0] == "(" else -1
        if depth == 0:
            return paren.end()
    return len(text)


def _heredocs_end(text: str, pos: int, tags: Iterable[str]) -> int:
    """`pos` is the start of a line; returns the line after the last body."""
    for tag in tags:
        while pos < len(text):
            end = _line_end(text, pos)
            line, pos = text[pos:end], end + 1
            if line.strip() == tag:
                break
    return min(pos, len(text))


def _unquote(token: str) -> str:
    body = token[1:-1]
    return _DOUBLE_ESCAPE.sub(r"\1", body) if token[0] == '"' else body
