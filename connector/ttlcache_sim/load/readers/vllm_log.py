"""vLLM's own log of requests: `--enable-log-requests`, with its prompts.

Versions without prompts in these lines have them at VLLM_LOGGING_LEVEL=DEBUG. Answers
are in the log with `--enable-log-outputs`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from ttlcache.toolcalls import detect, key_for_tool
from ttlcache_sim.load.readers import model_calls
from ttlcache_sim.load.readers.model_calls import Request, conversations
from ttlcache_sim.load.traces import Log, Reader, RecordedProgram, TraceError

_QUOTED = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_TIME = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")
_RECEIVED = re.compile(r"Received request \S+?:")
_PROMPT = re.compile(
    rf"(?:Received r|R)equest (\S+?)(?: details)?: prompt: (?:None|{_QUOTED})"
)
_TOKEN_IDS = re.compile(r"prompt_token_ids: \[([\d, ]+)\]")
#: In place of a text, as vLLM writes the first of an answer's calls.
_TOOL_CALL = re.compile(r"\[tool_calls: ([^\s(]+)\((\{.*?\})\)(?:, |\])")
_ANSWER = re.compile(rf"Generated response (\S+?)(?: \([\w ]+\))?: output: {_QUOTED}")


def _recognises(log: Log) -> bool:
    return any(map(_RECEIVED.search, log.lines))


def _read(log: Log) -> Iterator[RecordedProgram]:
    requests: dict[str, Request] = {}
    for line in log.lines:
        if found := _PROMPT.search(line):
            ids = _TOKEN_IDS.search(line, found.end())
            if not ids and not found[2]:
                continue
            tokens = len(ids[1].split(",")) if ids else None
            text = f"'{ids[1]},'" if ids and not found[2] else found[2]
            prompt = str(ast.literal_eval(text))
            usage = model_calls.Usage(prompt_tokens=tokens)
            requests[found[1]] = Request(prompt, usage, start_s=_seconds(line))
        elif (found := _ANSWER.search(line)) and found[1] in requests:
            answer = str(ast.literal_eval(found[2]))
            named = _TOOL_CALL.match(answer)
            tool = key_for_tool(named[1], named[2]) if named else detect(answer)
            requests[found[1]] = replace(
                requests[found[1]],
                answer=answer,
                tools=[tool] if tool else [],
                end_s=_seconds(line),
            )
    if not requests:
        number = next(
            n for n, line in enumerate(log.lines, 1) if _RECEIVED.search(line)
        )
        raise TraceError(
            f"{log.path}:{number}: prompt: not in the log; vLLM writes it with "
            "--enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG"
        )
    if _are_cut(list(requests.values())):
        raise TraceError(f"{log.path}: --max-log-len has cut its prompts")
    yield from conversations(list(requests.values()), log.path.stem)


def _are_cut(requests: Sequence[Request]) -> bool:
    """Several have as many characters as tokens, the same number, and none has more."""
    longest = max(len(each.prompt) for each in requests)
    cut = [each for each in requests if len(each.prompt) == longest]
    return sum(each.usage.prompt_tokens == longest for each in cut) > 1


def _seconds(line: str) -> float | None:
    """The lines have no year; all that counts is what lies between them."""
    found = _TIME.search(line)
    if found is None:
        return None
    return datetime.strptime(f"2024-{found[1]}", "%Y-%m-%d %H:%M:%S").timestamp()


READER = Reader("vLLM's log", _recognises, _read)
