"""Splits a shell script into pipelines of simple commands.

Not a shell: enough of its grammar to see which programs run. Quotes are removed,
redirections, comments and heredoc bodies are dropped, substitutions stay unread.
"""

from __future__ import annotations

import re
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
_PAREN = re.compile(r"[()]")
_DOUBLE_ESCAPE = re.compile(r"""\\(["\\$`])""")


@dataclass(slots=True)
class Pipeline:
    """Simple commands connected by pipes; `background` when it ended in `&`."""

    stages: list[list[str]] = field(default_factory=list)
    background: bool = False


def split_script(script: str) -> list[Pipeline]:
    """The pipelines of `script` in order. Linear time; never raises."""
    return _Lexer(script[:MAX_SCRIPT]).run()


class _Lexer:
    """One pass over a script. Its state is what has been read of the pipeline."""

    __slots__ = ("_heredocs", "_pipelines", "_skip_word", "_text", "_word", "_words")

    def __init__(self, text: str) -> None:
        self._text = text
        self._pipelines = [Pipeline()]
        self._words: list[str] = []
        self._word: str | None = None
        self._skip_word = False  # the word is the target of a redirection
        self._heredocs: list[str] = []

    def run(self) -> list[Pipeline]:
        pos = 0
        while match := _TOKEN.match(self._text, pos):
            pos = self._take(match)
        self._end_pipeline()
        return [pipeline for pipeline in self._pipelines if pipeline.stages]

    def _take(self, match: re.Match[str]) -> int:
        """Takes one token; returns where the next one starts."""
        kind, token, end = match.lastgroup, match[0], match.end()
        if kind == "op":
            return self._operator(token, end)
        if kind in ("space", "heredoc", "redirect"):
            self._end_word()
            if kind == "heredoc":
                self._heredocs.append(match["tag"].strip("'\"\\"))
            self._skip_word = self._skip_word or kind == "redirect"
        elif kind == "subst":
            end = self._substitution_end(end)
            self._append(self._text[match.start() : end])
        elif kind == "plain" and self._word is None and token.startswith("#"):
            return self._line_end(end)
        elif kind == "quoted":
            self._append(_unquote(token.lstrip("$")))
        else:
            self._append(token[1:] if kind == "escaped" else token)
        return end

    def _operator(self, token: str, end: int) -> int:
        self._end_word()
        self._end_command()
        if token not in ("|", "|&"):
            self._end_pipeline(background=token == "&")
        return self._skip_heredocs(end) if token == "\n" else end

    def _append(self, piece: str) -> None:
        self._word = (self._word or "") + piece

    def _end_word(self) -> None:
        if self._word is None:
            return
        if not self._skip_word and len(self._words) < MAX_WORDS:
            self._words.append(self._word)
        self._word, self._skip_word = None, False

    def _end_command(self) -> None:
        self._skip_word = False
        if self._words:
            self._pipelines[-1].stages.append(self._words)
            self._words = []

    def _end_pipeline(self, background: bool = False) -> None:
        self._end_word()
        self._end_command()
        if self._pipelines[-1].stages:
            self._pipelines[-1].background = background
            self._pipelines.append(Pipeline())

    def _line_end(self, pos: int) -> int:
        end = self._text.find("\n", pos)
        return len(self._text) if end < 0 else end

    def _substitution_end(self, pos: int) -> int:
        depth = 1
        for paren in _PAREN.finditer(self._text, pos):
            depth += 1 if paren[0] == "(" else -1
            if depth == 0:
                return paren.end()
        return len(self._text)

    def _skip_heredocs(self, pos: int) -> int:
        """`pos` is the start of a line; returns the line after the last body."""
        for tag in self._heredocs:
            while pos < len(self._text):
                end = self._line_end(pos)
                line, pos = self._text[pos:end], end + 1
                if line.strip() == tag:
                    break
        self._heredocs.clear()
        return min(pos, len(self._text))


def _unquote(token: str) -> str:
    body = token[1:-1]
    return _DOUBLE_ESCAPE.sub(r"\1", body) if token[0] == '"' else body
