"""Where a prompt ends that the next one repeats without what came of it.

A chat template ends each prompt with the same few tokens, of which the next prompt may
lack the last ones: `<think>`, and what belongs to it. Other endings are the client's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttlcache.types import Arrival, TokenSlice

#: Tokens that the next prompt may lack, at most: `<think>\n\n</think>\n\n`.
TEMPLATE_TOKENS = 4
#: With no more behind it, it is the same prompt under another end of the template's.
MOST_END_TOKENS = 8
#: Tokens before an ending by which prompts are told apart, and endings remembered.
BEFORE_TOKENS, MAX_ENDINGS = 8, 32
_DIGEST_MASK = (1 << 39) - 1
#: A digest's last bits: of how many tokens it is. Blocks with a state have thousands.
_LENGTH_BITS, LENGTH_MASK = 16, 0xFFFF


class GenerationPrompt:
    """Endings that a tenant's prompts had. O(1) a prompt.

    One is the template's once two different prompts had it: of a batch of one prompt it
    is not known.
    """

    def __init__(self) -> None:
        # What stood before it, None once prompts differ there; the latest come last.
        self._before: dict[int, int | None] = {}

    def stable_tokens(self, arrival: Arrival) -> int:
        """Of a prompt that came, without those of the template."""
        stop = arrival.num_tokens
        start = max(0, stop - TEMPLATE_TOKENS)
        key = hash((arrival.tenant, *arrival.tokens(start, stop)))
        before = hash(tuple(arrival.tokens(max(0, start - BEFORE_TOKENS), start)))
        known = self._before.pop(key, before)
        is_template = known is None or known != before
        self._before[key] = None if is_template else before
        if len(self._before) > MAX_ENDINGS:
            del self._before[next(iter(self._before))]
        return start if is_template else stop


@dataclass(slots=True)
class PromptEnd:
    """A prompt without the template's last tokens. (There is one for each open turn.)

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
    ) -> PromptEnd | None:
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
    """Of the tokens behind a full block, and of their number; 0 where none are."""
    digest = hash(tuple(tokens)) & _DIGEST_MASK if tokens else 0
    return (digest << 1 | is_prompt) << _LENGTH_BITS | len(tokens)
