"""Prefix inference: which finished turn does an anonymous prompt continue?

A turn is remembered under the hash of its last full block, together with a
digest of the tokens behind it. A prompt continues the turn when it holds that
block at that place, the same tokens behind it, and more: two programs that
merely share a system prompt differ there. Its prompt is remembered as well, without the
template's last tokens (`prompt_fingerprint`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ttlcache.programs.model import Program
from ttlcache.programs.prompt_fingerprint import (
    MOST_END_TOKENS,
    PROMPT_BIT,
    tail_digest,
    tail_digests,
)
from ttlcache.types import TokenSlice

#: The live program of a number, None for one that ended.
ProgramOf = Callable[[int], Program | None]

_NUMBER_BITS = 64
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1


class PrefixIndex:
    """Ends of finished contexts by block hash; bounded, oldest forgotten first.

    Hashes are chained, so one hash is one place: under it the contexts differ only
    in the tokens behind. Most places hold one context, kept as a single integer of
    digest and program number; several are kept as {digest: number}. Programs are
    numbers here, so that ended ones are not kept in memory.

    A place that is remembered again while it is the oldest gets a second chance.
    """

    def __init__(self, block_tokens: int, capacity: int = 65_536) -> None:
        self._block_tokens = block_tokens
        self._capacity = capacity
        self._places: dict[bytes, int | dict[int, int]] = {}
        self._order: deque[bytes] = deque()  # places, oldest first
        self._again: set[bytes] = set()  # those remembered since their turn came
        self._size = 0

    def __len__(self) -> int:
        """Contexts remembered."""
        return self._size

    def remember(
        self,
        number: int,
        hashes: Sequence[bytes],
        num_tokens: int,
        tokens: TokenSlice,
        *,
        is_prompt: bool = False,
    ) -> None:
        """Index the first `num_tokens` tokens as a context of program `number`.

        hashes: at least the full blocks of those tokens.
        is_prompt: a prompt without the template's last tokens.
        """
        num_blocks = num_tokens // self._block_tokens
        if not 0 < num_blocks <= len(hashes):
            return
        key = hashes[num_blocks - 1]
        tail = tokens(num_blocks * self._block_tokens, num_tokens)
        digest = tail_digest(tail, is_prompt=is_prompt)
        place = self._places.get(key)
        if place is None:
            self._places[key] = digest << _NUMBER_BITS | number
            self._order.append(key)
            self._size += 1
        else:
            self._again.add(key)
            self._add(key, place, digest, number)
        if self._size > self._capacity:
            self._shrink()

    def find(
        self,
        hashes: Sequence[bytes],
        num_tokens: int,
        tokens: TokenSlice,
        program_of: ProgramOf,
    ) -> Program | None:
        """The live program that has the longest indexed context as prefix.

        O(blocks) dictionary look-ups, once per request without an id.
        """
        if not self._places:
            return None
        # In C: a first turn asks for every block in vain.
        hits = map(self._places.__contains__, reversed(hashes))
        index = len(hashes)
        for is_hit in hits:
            index -= 1
            if is_hit:
                found = self._at(index, hashes, num_tokens, tokens, program_of)
                if found is not None:
                    return found
        return None

    def _at(
        self,
        index: int,
        hashes: Sequence[bytes],
        num_tokens: int,
        tokens: TokenSlice,
        program_of: ProgramOf,
    ) -> Program | None:
        """The program of the longest matching context that ends in block `index`."""
        place = self._places[hashes[index]]
        if isinstance(place, int):
            place = {place >> _NUMBER_BITS: place & _NUMBER_MASK}
        if not any(program_of(number) for number in reversed(place.values())):
            return None  # a long conversation whose program ended has many places
        start = (index + 1) * self._block_tokens
        stop = min(start + self._block_tokens, num_tokens) - 1
        if stop < start:
            return None  # a continuation has more than the context
        tail = tokens(start, stop)
        # The same prompt again is a program of its own.
        prompt_tail = num_tokens - MOST_END_TOKENS - 1 - start
        digests = tail_digests(tail)
        for length in range(len(tail), -1, -1):
            for prompt_bit in (0, PROMPT_BIT) if length <= prompt_tail else (0,):
                number = place.get(digests[length] | prompt_bit)
                program = None if number is None else program_of(number)
                if program is not None:
                    return program
        return None

    def _add(
        self, key: bytes, place: int | dict[int, int], digest: int, number: int
    ) -> None:
        """One more context, or a newer program of the same one, at a known place."""
        if isinstance(place, dict):
            self._size += digest not in place
            place[digest] = number
            return
        old_digest, old_number = place >> _NUMBER_BITS, place & _NUMBER_MASK
        if old_digest == digest:
            self._places[key] = digest << _NUMBER_BITS | number
        else:
            self._places[key] = {old_digest: old_number, digest: number}
            self._size += 1

    def _shrink(self) -> None:
        while self._size > self._capacity:
            key = self._order.popleft()
            if key in self._again:
                self._again.remove(key)
                self._order.append(key)
                continue
            place = self._places[key]
            self._size -= 1
            if isinstance(place, dict) and len(place) > 1:
                del place[next(iter(place))]
                self._order.appendleft(key)
            else:
                del self._places[key]
