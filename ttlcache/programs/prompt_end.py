"""Where a prompt ends that the next one repeats without what came of it.

A chat template ends each prompt with the same few tokens, of which the next prompt may
lack the last ones (`<think>`). They are those that the latest prompts have in common at
their ends: what tells prompts apart is not among them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ttlcache.types import Arrival, TokenSlice

#: Prompts that are compared, and tokens that count as the template's at most.
PROMPTS, MOST_TOKENS = 8, 8
_DIGEST_MASK = (1 << 40) - 1
#: A digest's last bits: of how many tokens it is. Blocks with a state have thousands.
_LENGTH_BITS, LENGTH_MASK = 16, 0xFFFF


class GenerationPrompt:
    """The tokens with which the latest prompts all ended. O(1) a prompt."""

    def __init__(self) -> None:
        self._endings: deque[tuple[int, ...]] = deque(maxlen=PROMPTS)

    def observe(self, arrival: Arrival) -> int:
        """A prompt came: so many of its tokens are the template's; 0 while unknown."""
        stop = arrival.num_tokens
        ending = tuple(arrival.tokens(max(0, stop - MOST_TOKENS), stop))
        self._endings.append(ending[::-1])
        if len(self._endings) == 1:
            return 0
        shared = 0
        # What the first and the last in order have in common, all have.
        pairs = zip(min(self._endings), max(self._endings), strict=False)
        for one, other in pairs:
            if one != other:
                break
            shared += 1
        return shared


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
        if arrival.num_tokens <= stop + MOST_TOKENS:
            return False
        if len(arrival.hashes) < self.num_hashes:
            return False
        if arrival.hashes[self.num_hashes - 1] != self.last_hash:
            return False
        return tail_digest(arrival.tokens(start, stop)) == self.tail_digest


def tail_digest(tokens: Sequence[int]) -> int:
    """Of the tokens behind a full block, and of their number; 0 of none."""
    digest = hash(tuple(tokens)) & _DIGEST_MASK if tokens else 0
    return digest << _LENGTH_BITS | len(tokens)
