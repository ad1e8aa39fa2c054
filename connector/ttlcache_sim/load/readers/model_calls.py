"""What readers make programs of: calls of a model, transcripts, single requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import AliasChoices, Field

from ttlcache.toolcalls import key_for_tool
from ttlcache.types import USER_TOOL, GapKey
from ttlcache_sim.load.traces import (
    DECODE_S_PER_TOKEN,
    LogPart,
    RecordedProgram,
    RecordedTurn,
    Tokens,
)

#: What stands for a tokenizer where a log has no token counts.
CHARS_PER_TOKEN = 4
#: Of an answer that is not in the log: the mean of our workloads.
_OUTPUT_TOKENS = 250
#: Of a first prompt, so much is compared with others.
OPENING_CHARS = 400_000
#: A prompt below this share of the last one begins a new program: compacted, or old
#: results are left out. The second of a context whose tokens are guessed.
_COMPACTED, _COMPACTED_IF_GUESSED = 0.9, 0.5
#: Values beside the text.
_NO_TEXT = frozenset(
    [
        "id",
        "type",
        "role",
        "kind",
        "signature",
        "encrypted_content",
        "cache_control",
        "call_id",
        "tool_call_id",
        "tool_use_id",
    ]
)
_OUTPUT_NAMES = AliasChoices("completion_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Call:
    """One request to a model, as a log tells it; times on the log's own clock.

    prompt_tokens: the whole prompt. start_s, end_s: when it was sent, and when its
        output had come; None where unknown.
    tools: called in its output: empty for none, None where the log does not say.
    tool_s: how long they took, where the log itself says so.
    is_counted: the tokens are counts, not characters / `CHARS_PER_TOKEN`.
    prompt_is_counted: those of the prompt.
    opening, cached_tokens, unlogged_tokens: as in `RecordedProgram`, of a first call.
    """

    prompt_tokens: int
    output_tokens: int
    start_s: float | None = None
    end_s: float | None = None
    tools: Sequence[GapKey] | None = None
    tool_s: float | None = None
    is_counted: bool = True
    prompt_is_counted: bool = True
    opening: str = ""
    cached_tokens: int | None = None
    unlogged_tokens: int | None = None


def programs_of(program_id: str, calls: Sequence[Call]) -> Iterator[RecordedProgram]:
    """The program that made these calls, in order; from each compaction on a new one.

    A prompt that is a little shorter than the context before it, as where reasoning is
    dropped, has one new token, and "context" among `RecordedTurn.estimated`.
    """
    parts: list[list[RecordedTurn]] = []
    context = 0
    for index, call in enumerate(calls):
        if not parts or _is_compacted(calls[index - 1], call, context):
            parts.append([])
            context = 0
        following = calls[index + 1] if index + 1 < len(calls) else None
        turn = _turn(call, call.prompt_tokens - context, following)
        parts[-1].append(turn)
        context += turn.new_prompt_tokens + turn.output_tokens
    for number, turns in enumerate(parts, start=1):
        yield RecordedProgram(
            program_id=program_id if number == 1 else f"{program_id}#{number}",
            turns=turns,
            part=number,
            opening=calls[0].opening,
            cached_tokens=calls[0].cached_tokens,
            unlogged_tokens=calls[0].unlogged_tokens,
        )


def _is_compacted(last: Call, call: Call, context_tokens: int) -> bool:
    """Whether the context that the last call left is gone."""
    if last.prompt_is_counted and call.prompt_is_counted:
        return call.prompt_tokens < _COMPACTED * last.prompt_tokens
    return call.prompt_tokens < _COMPACTED_IF_GUESSED * context_tokens


def _turn(call: Call, new_tokens: int, following: Call | None) -> RecordedTurn:
    tool_s, is_guess = _gap(call, following) if following else (None, False)
    tool, exe = _tool_names(call.tools)
    estimated = [] if call.is_counted else ["tokens"]
    if new_tokens < 1 and call.prompt_is_counted:
        estimated.append("context")
    return RecordedTurn(
        new_prompt_tokens=max(1, new_tokens),
        output_tokens=max(1, call.output_tokens),
        tool=tool,
        exe=exe,
        tool_s=tool_s,
        estimated=tuple([*estimated, "tool_s"] if is_guess else estimated),
    )


def _gap(call: Call, following: Call) -> tuple[float | None, bool]:
    """Seconds to the next request, and whether the time of an answer was guessed."""
    if call.tool_s is not None:
        return call.tool_s, False
    if call.end_s is not None and following.start_s is not None:
        return max(0.0, following.start_s - call.end_s), False
    for before_s, after_s, answer in (
        (call.end_s, following.end_s, following),
        (call.start_s, following.start_s, call),
    ):
        if before_s is not None and after_s is not None:
            answer_s = DECODE_S_PER_TOKEN * answer.output_tokens
            return max(0.0, after_s - before_s - answer_s), True
    return None, False


def _tool_names(tools: Sequence[GapKey] | None) -> tuple[str | None, str | None]:
    """`tool` and `exe` of a turn; the names of parallel calls are joined by "+"."""
    if tools is None:
        return None, None
    keys = sorted(set(tools))
    if len(keys) > 1:
        return "+".join(sorted({key.executable or key.tool for key in keys})), None
    if not keys:
        return USER_TOOL, None
    key = keys[0]
    return ("bash", key.executable) if key.executable else (key.tool, None)


def texts_in(value: Any) -> Iterator[str]:
    """All text in a JSON value that a model reads or writes."""
    if isinstance(value, str):
        yield value
    if isinstance(value, Mapping):
        value = [item for key, item in value.items() if key not in _NO_TEXT]
    if isinstance(value, list):
        for item in value:
            yield from texts_in(item)


def num_chars(value: Any) -> int:
    return sum(map(len, texts_in(value)))


def num_tokens(chars: float) -> int:
    """Of so many characters, about."""
    return round(chars / CHARS_PER_TOKEN)


def tools_in(value: Any) -> list[GapKey]:
    """The calls in an answer: OpenAI's chat and Responses items, Anthropic's blocks."""
    if isinstance(value, Mapping):
        name, arguments = value.get("name"), value.get("arguments", value.get("input"))
        if isinstance(name, str) and isinstance(arguments, str | Mapping):
            return [key_for_tool(name, arguments)]
        value = list(value.values())
    if not isinstance(value, list):
        return []
    return [key for item in value for key in tools_in(item)]


class _Details(LogPart):
    cached_tokens: Tokens | None = None


class Usage(LogPart):
    """Token counts of an answer, as OpenAI's and Anthropic's APIs name them."""

    prompt_tokens: Tokens | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = Field(default=None, validation_alias=_OUTPUT_NAMES)
    #: Anthropic's input tokens are those that no cache had; LiteLLM has these beside
    #: the whole prompt's.
    cache_read_input_tokens: Tokens | None = None
    cache_creation_input_tokens: Tokens | None = None
    prompt_tokens_details: _Details = _Details()
    #: As Codex writes it.
    cached_input_tokens: Tokens | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt, what the server's cache had."""
        for told in (self.cache_read_input_tokens, self.cached_input_tokens):
            if told is not None:
                return told
        return self.prompt_tokens_details.cached_tokens

    @property
    def whole_prompt(self) -> int:
        """0 where it is not told."""
        if self.prompt_tokens:
            return self.prompt_tokens
        read, written = self.cache_read_input_tokens, self.cache_creation_input_tokens
        return (self.input_tokens or 0) + (read or 0) + (written or 0)

    @property
    def is_whole(self) -> bool:
        """Whether both counts are told."""
        return bool(self.whole_prompt) and self.output_tokens is not None


@dataclass(slots=True)
class Transcript:
    """A conversation as it grows, from which come its calls."""

    calls: list[Call] = field(default_factory=list)
    _chars: int = 0
    _opening: str = ""
    _asked_s: float | None = None
    _name: str = ""

    def add_input(self, *texts: Any, at_s: float | None = None) -> None:
        """What the next prompt has more; at_s: when it was there."""
        found = "".join(texts_in(list(texts)))
        if not self.calls:
            self._opening = (self._opening + found)[:OPENING_CHARS]
        self._chars += len(found)
        self._asked_s = at_s

    def add_answer(
        self,
        *texts: Any,
        tools: Sequence[GapKey] = (),
        name: str = "",
        usage: Usage | None = None,
        at_s: float | None = None,
        tool_s: float | None = None,
    ) -> None:
        """An answer, or more of it where the last one had the same name.

        usage: in place of characters, as far as it is told. at_s: when it had come.
        """
        length = num_chars(list(texts))
        usage = usage or Usage()
        unlogged = usage.whole_prompt - num_tokens(self._chars)
        call = Call(
            usage.whole_prompt or num_tokens(self._chars),
            num_tokens(length) if usage.output_tokens is None else usage.output_tokens,
            self._asked_s,
            at_s,
            tools,
            tool_s,
            usage.is_whole,
            bool(usage.whole_prompt),
            "" if self.calls else self._opening,
            usage.cached_tokens,
            max(0, unlogged) if usage.whole_prompt else None,
        )
        if name and name == self._name:
            call = _joined(self.calls.pop(), call, usage)
        self.calls.append(call)
        self._chars += length
        self._name = name


def _joined(before: Call, more: Call, usage: Usage) -> Call:
    output = more.output_tokens
    if usage.output_tokens is None:
        output = before.output_tokens + (0 if before.is_counted else output)
    return replace(
        more,
        prompt_tokens=more.prompt_tokens
        if usage.whole_prompt
        else before.prompt_tokens,
        output_tokens=output,
        start_s=before.start_s,
        opening=before.opening,
        tools=[*(before.tools or ()), *(more.tools or ())],
        is_counted=before.is_counted or more.is_counted,
    )


@dataclass(frozen=True, slots=True)
class Request:
    """prompt: its text. answer: anything with its text, None where it is not logged.

    session: an id that the client sent. answer_id, previous_answer_id: of its answer,
        and of the one that it continues (`previous_response_id`). "" for none.
    Others: as in `Call`.
    """

    prompt: str
    usage: Usage = field(default_factory=Usage)
    answer: Any = None
    tools: Sequence[GapKey] | None = None
    start_s: float | None = None
    end_s: float | None = None
    session: str = ""
    answer_id: str = ""
    previous_answer_id: str = ""

    @property
    def call(self) -> Call:
        usage = self.usage
        output = usage.output_tokens
        if output is None and self.answer:
            output = num_tokens(num_chars(self.answer))
        return Call(
            usage.whole_prompt or num_tokens(len(self.prompt)),
            _OUTPUT_TOKENS if output is None else output,
            self.start_s,
            self.end_s,
            self.tools,
            is_counted=usage.is_whole,
            prompt_is_counted=bool(usage.whole_prompt),
            cached_tokens=usage.cached_tokens,
        )


@dataclass(slots=True)
class _Conversation:
    name: str
    prompt: str = ""
    calls: list[Call] = field(default_factory=list)

    def is_continued_by(self, prompt: str) -> bool:
        """A first prompt once more begins anew; a later one is a retry."""
        is_again = len(prompt) == len(self.prompt) and len(self.calls) == 1
        return not is_again and prompt.startswith(self.prompt)


def conversations(requests: Sequence[Request], name: str) -> Iterator[RecordedProgram]:
    """Programs of requests, sorted by time where all have one.

    A prefix cache sees the same: what does not extend an earlier prompt is new.
    """
    if all(request.start_s is not None for request in requests):
        requests = sorted(requests, key=lambda request: request.start_s or 0.0)
    found: list[_Conversation] = []
    by_session: dict[str, list[_Conversation]] = {}
    by_answer: dict[str, _Conversation] = {}
    for request in requests:
        own = by_session.setdefault(request.session, [])
        known = [each for each in own if each.is_continued_by(request.prompt)]
        longest = max(known, key=lambda each: len(each.prompt), default=None)
        if request.previous_answer_id in by_answer:  # its prompt is what is new
            longest = by_answer[request.previous_answer_id]
            request = replace(request, prompt=longest.prompt + request.prompt)
        if longest is None:
            longest = _Conversation(request.session or f"{name}-{len(found)}")
            found.append(longest)
            own.append(longest)
        longest.prompt = request.prompt
        if request.answer_id:
            by_answer[request.answer_id] = longest
        opening = "" if longest.calls else request.prompt[:OPENING_CHARS]
        longest.calls.append(replace(request.call, opening=opening))
    for each in found:
        yield from programs_of(each.name, each.calls)
