"""Recognises a program by its growing prompt, without any id, in bounded memory."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

#: Prompts are hashed in steps of so many bytes; what is left at the end is compared
#: byte by byte, so that a match is a true prefix.
STEP_BYTES = 512
#: Prompts remembered: 33 MB as a rule, at most 50 MB (docs/fleet.md tells it).
MAX_PROMPTS = 50_000
#: Prompts that share all full steps and differ in the rest; the oldest is forgotten.
MAX_SAME_STEPS = 64
#: A prompt that so many others go on from is what programs have in common (a system
#: prompt), not one program.
MAX_BRANCHES = 8


@dataclass(slots=True)
class _Prompt:
    """The end of one request's prompt."""

    rest: bytes
    key: str
    branches: int = 0


class PromptMemory:
    """Prompts seen, by their content; the longest unused are forgotten.

    Costs one hash over the prompt; memory is bounded whatever clients send.
    """

    def __init__(self, max_prompts: int = MAX_PROMPTS) -> None:
        self._max_prompts = max_prompts
        self._by_steps: OrderedDict[bytes, list[_Prompt]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def key(self, prompt: bytes) -> str:
        """The key of the program that this prompt belongs to, remembered from now.

        The program of the longest remembered prompt that this one extends or equals;
        otherwise a new one, named by the prompt's digest.
        """
        steps = list(_steps(prompt))
        rest = prompt[(len(steps) - 1) * STEP_BYTES :]
        same = next((p for p in self._at(steps[-1]) if p.rest == rest), None)
        if same is not None:
            return same.key
        before = self._find(prompt, steps)
        if before is None:
            key = hashlib.blake2b(prompt, digest_size=16).hexdigest()
        else:
            before.branches += 1
            key = before.key
        self._remember(steps[-1], _Prompt(rest, key))
        return key

    def _at(self, steps: bytes) -> list[_Prompt]:
        prompts = self._by_steps.get(steps)
        if prompts is None:
            return []
        self._by_steps.move_to_end(steps)
        return prompts

    def _find(self, prompt: bytes, steps: list[bytes]) -> _Prompt | None:
        """The longest remembered prompt that this one goes on from."""
        for number in range(len(steps) - 1, -1, -1):
            rest = prompt[number * STEP_BYTES : (number + 1) * STEP_BYTES]
            matches = [
                p
                for p in self._at(steps[number])
                if rest.startswith(p.rest) and p.branches < MAX_BRANCHES
            ]
            if matches:
                return max(matches, key=lambda p: len(p.rest))
        return None

    def _remember(self, steps: bytes, prompt: _Prompt) -> None:
        prompts = self._by_steps.setdefault(steps, [])
        prompts.append(prompt)
        self._size += 1
        if len(prompts) > MAX_SAME_STEPS:
            prompts.pop(0)
            self._size -= 1
        while self._size > self._max_prompts:
            _, forgotten = self._by_steps.popitem(last=False)
            self._size -= len(forgotten)


def _steps(prompt: bytes) -> Iterator[bytes]:
    """Digest of the first 0, 1, 2 … full steps."""
    digest = hashlib.blake2b(digest_size=16)
    yield digest.digest()
    for start in range(0, len(prompt) - STEP_BYTES + 1, STEP_BYTES):
        digest.update(prompt[start : start + STEP_BYTES])
        yield digest.digest()
