"""`ttlcache doctor --model …`: does the chat template leave earlier turns as they are?

The template is rendered with small conversations, and with the same ones a turn later:
what is no longer the same is computed again in every such turn, whatever is cached.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, NOTE, BAD = "ok", "note", "BAD"
_NAME = "chat template"
_CLAUDE = "for Claude Code set CLAUDE_CODE_TOTAL_TOKENS_REMINDER=off"
_SYSTEM = {"role": "system", "content": "Alpha instructions."}
_USER = {"role": "user", "content": "Bravo question."}
_NEXT = {"role": "user", "content": "Charlie question."}
_ANSWER = {"role": "assistant", "content": "Delta answer."}
_LATE = {"role": "system", "content": "Echo note."}
_THOUGHT = "Foxtrot thought."
#: The names that templates know reasoning by, and the text itself for the rest.
_THINKING: tuple[dict[str, Any], ...] = (
    {
        **_ANSWER,
        **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT),
    },
    {**_ANSWER, "content": f"<think>\n{_THOUGHT}\n</think>\n\nDelta answer."},
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `ttlcache doctor`; BAD: what was asked about will not work."""

    state: str
    what: str
    text: str


class _Template:
    def __init__(self, text: str) -> None:
        self._text = text
        self._utils = importlib.import_module("transformers.utils.chat_template_utils")

    def render(self, messages: Sequence[dict[str, Any]]) -> str | None:
        """The text of a conversation; None where the template refuses it."""
        jinja = importlib.import_module("jinja2")
        try:
            rendered, _ = self._utils.render_jinja_template(
                conversations=[list(messages)],
                chat_template=self._text,
                bos_token="<s>",
                eos_token="</s>",
            )
        except jinja.TemplateError:
            return None
        return str(rendered[0])


def findings(model: str | None, chat_template: Path | None) -> Iterator[Finding]:
    """About the template that a server uses of itself, or of `--chat-template`."""
    if model is None and chat_template is None:
        return
    try:
        text = _text_of(model, chat_template)
    except Exception as error:  # noqa: BLE001 - of files and of other people's code
        why = getattr(error, "strerror", None) or error  # a file's, without its name
        yield Finding(BAD, _NAME, f"{chat_template or model}: {why}")
        return
    if text is None:
        yield Finding(NOTE, _NAME, f"{model} has none: chats need --chat-template")
        return
    template = _Template(text)
    try:
        notes = list(_notes(template))
    except Exception as error:  # noqa: BLE001 - a template is somebody else's code
        yield Finding(NOTE, _NAME, f"cannot be tried: {type(error).__name__}: {error}")
        return
    for note in notes:
        yield Finding(NOTE, _NAME, note)
    if not notes:
        yield Finding(OK, _NAME, "a later turn leaves everything before it as it was")


def _text_of(model: str | None, chat_template: Path | None) -> str | None:
    if chat_template is not None:
        return chat_template.read_text(encoding="utf-8")
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    return None if tokenizer.chat_template is None else tokenizer.get_chat_template()


def _notes(template: _Template) -> Iterator[str]:
    for look in (_growth, _late_system, _reasoning):
        note = look(template)
        if note is not None:
            yield note


def _growth(template: _Template) -> str | None:
    """Is a prompt the beginning of the next one?"""
    opening = [_SYSTEM, _USER]
    before = template.render(opening)
    if before is None:
        opening = [_USER]  # a template without system text
        before = template.render(opening)
    after = template.render((*opening, _ANSWER, _NEXT))
    if before is None or after is None:
        return "refuses a plain conversation"
    end = before.find(_USER["content"]) + len(_USER["content"])
    if before[:end] == after[:end]:
        return None
    return (
        "rewrites earlier messages when a turn follows: what stands behind the first "
        "of them is computed again"
    )


def _late_system(template: _Template) -> str | None:
    """Where does system text go that comes later than the first message?"""
    after = template.render((_SYSTEM, _USER, _ANSWER, _NEXT, _LATE))
    if after is None:
        return (
            "refuses system messages behind the first: on /v1/messages vLLM moves them "
            "to the head of the prompt, and each new one makes it compute everything "
            f"behind them again; {_CLAUDE}, or a --chat-template that takes them"
        )
    place = after.find(_LATE["content"])
    if place < 0:
        return "drops system messages behind the first"
    if place < after.find(_USER["content"]):
        return (
            "moves all system messages to the head of the prompt: each new one makes "
            f"vLLM compute everything behind them again; {_CLAUDE}"
        )
    return None


def _reasoning(template: _Template) -> str | None:
    """Does reasoning stay where it was once another turn follows?"""
    for thinking in _THINKING:
        now = template.render((_USER, thinking))
        later = template.render((_USER, thinking, _NEXT, _ANSWER, _NEXT))
        if now is None or later is None or _THOUGHT not in now:
            continue
        if _THOUGHT in later:
            return None
        return (
            "drops reasoning of turns before the last user message: what follows the "
            "first of it is computed again then (not between tool calls)"
        )
    return (
        "drops all reasoning: each turn computes its predecessor's answer again "
        "(of reasoning models)"
    )
