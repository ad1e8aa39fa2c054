"""Where a prompt ends that the next one repeats without what came of it.

A chat template ends each prompt with the same few tokens, of which the next prompt may
lack the last ones: `<think>`, and what belongs to it. Other endings are the client's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from ttlcache.types import Arrival, TokenSlice

T = TypeVar("T")

#: Tokens that the next prompt may lack, at most: `<think>\n\n</think>\n\n`.
TEMPLATE_TOKENS = 4
#: A prompt that has no more behind another one repeats it, and does not continue it.
MOST_END_TOKENS = 8
#: Different prompts with which an ending is the template's, and not what a client said;
#: tokens before it by which they are told apart.
MIN_PROMPTS, BEFORE_TOKENS = 4, 8
#: Endings remembered: of templates, and others.
MAX_TEMPLATES, MAX_OTHERS = 64, 24
# With the bit for prompts 40: so a place of the prefix index takes four digits.
_DIGEST_MASK = (1 << 39) - 1
#: A digest's last bits: of how many tokens it is. Blocks with a state have thousands.
_LENGTH_BITS = 16
#: And whether those end a prompt.
PROMPT_BIT = 1 << _LENGTH_BITS


class GenerationPrompt:
    """Learns with which tokens templates end prompts. O(1) a prompt.

    A batch of one prompt teaches nothing. What is learnt stays, whatever other prompts
    end with.
    """

    def __init__(self) -> None:
        # The latest come last. Of others: digests of what stood before them.
        self._templates: dict[int, None] = {}
        self._others: dict[int, tuple[int, ...]] = {}

    def stable_tokens(self, arrival: Arrival) -> int:
        """Of a prompt that came, without those of the template."""
        stop = arrival.num_tokens
        start = max(0, stop - TEMPLATE_TOKENS)
        ending = hash(tuple(arrival.tokens(start, stop)))
        if ending in self._templates:
            self._templates[ending] = self._templates.pop(ending)
            return start
        before = hash(tuple(arrival.tokens(max(0, start - BEFORE_TOKENS), start)))
        before &= 0xFFFFFFF  # a small integer
        known = self._others.pop(ending, ())
        if before not in known:
            known = (*known, before)
        if len(known) >= MIN_PROMPTS:
            _remember(self._templates, ending, None, MAX_TEMPLATES)
            return start
        _remember(self._others, ending, known, MAX_OTHERS)
        return stop


def _remember(table: dict[int, T], key: int, value: T, most: int) -> None:
    table[key] = value
    if len(table) > most:
        del table[next(iter(table))]


@dataclass(slots=True)
class PromptFingerprint:
    """A prompt without the template's last tokens. (One for each awaited turn.)

    num_hashes, last_hash: of its last full block.
    tail_tokens, tail_digest: of the tokens behind it.
    """

    num_hashes: int
    last_hash: bytes
    tail_tokens: int
    tail_digest: int

    @classmethod
    def of(
        cls,
        hashes: Sequence[bytes],
        tokens: TokenSlice,
        stable_tokens: int,
        block_tokens: int,
    ) -> PromptFingerprint | None:
        """None of a prompt below a block.

        Args:
            hashes: at least those of the full blocks of the first `stable_tokens`.
        """
        num_hashes = stable_tokens // block_tokens
        if not 0 < num_hashes <= len(hashes):
            return None
        start = num_hashes * block_tokens
        tail = tail_digest(tokens(start, stable_tokens))
        return cls(num_hashes, hashes[num_hashes - 1], stable_tokens - start, tail)

    def is_extended_by(self, arrival: Arrival, block_tokens: int) -> bool:
        """Whether a prompt begins with this one, and goes on behind the template's."""
        start = self.num_hashes * block_tokens
        stop = start + self.tail_tokens
        if arrival.num_tokens <= stop + MOST_END_TOKENS:
            return False
        if len(arrival.hashes) < self.num_hashes:
            return False
        if arrival.hashes[self.num_hashes - 1] != self.last_hash:
            return False
        return tail_digest(arrival.tokens(start, stop)) == self.tail_digest


def tail_digest(tokens: Sequence[int], *, is_prompt: bool = False) -> int:
    """Of the tokens behind a full block, and of their number."""
    digest = tail_digests(tokens)[-1]
    return digest | PROMPT_BIT if is_prompt else digest


def tail_digests(tokens: Sequence[int]) -> list[int]:
    """`tail_digest` of none of these tokens, of the first, of the first two, …"""
    chained = accumulate(tokens, lambda known, token: hash((known, token)), initial=0)
    return [
        (digest & _DIGEST_MASK) << 1 + _LENGTH_BITS | length
        for length, digest in enumerate(chained)
    ]
