"""What is known of one request, from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ttlcache.divergence import Divergence
from ttlcache.fairness import Place
from ttlcache.hints import Hints
from ttlcache.pins import Pin
from ttlcache.programs import Program

#: A return whose cache hit is below this share of its context lost its KV.
EVICTED_BELOW = 0.5


class Claim(NamedTuple):
    """A pin that a request took over.

    tokens: of its prompt, served from the pin.
    saved_tokens, saved_s: of those, what plain vLLM's prefix cache would have evicted,
        and the seconds of prefill that it would cost.
    """

    pin_id: int
    tokens: int
    saved_tokens: int
    saved_s: float


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request between arrival and finish."""

    request_id: str
    program: Program
    hints: Hints
    seq: int
    queued_s: float
    user_priority: int
    place: Place  # the place of the context that it continues, or a new one
    num_tokens: int = 0  # of its prompt
    head_tokens: int = 0  # of its program's main conversation's first prompt, 0 aside
    divergence: Divergence | None = None  # from its program's last context
    program_seq: int = 0  # where its program stood when it was queued, or moved back
    turn_seq: int = 0  # place that a new context would have got instead
    claim_counts: bool = True  # not while its program's quantum is used up
    work_left_s: float | None = None  # of its program, expected when it was queued
    reusable_tokens: int = 0  # context of the turn it continues that it repeats
    promoted_s: float | None = None  # when its ordering's anti-starvation rule struck
    pin_id: int | None = None  # the pin it will claim
    refused_s: float | None = None  # when memory was first refused to it
    admitted_s: float | None = None
    cached_tokens: int = 0
    lower_epoch: int | None = None  # in which the turn it continues was left below
    asked_below: bool = False  # that tier was asked for what GPU memory has not
    lost_tokens: int = 0  # what it was asked for: lost when first admitted
    reloaded_tokens: int = 0  # what came back of that
    first_token_s: float | None = None
    prefill_s: float = 0.0  # of the engine's steps, what its prompt took
    reloads: bool = False  # since it was last admitted

    def memory_wait_s(self, now_s: float) -> float:
        """For how long memory has been refused to it."""
        return 0.0 if self.refused_s is None else now_s - self.refused_s

    def lost_its_kv(self, cached_tokens: int) -> bool:
        """Whether so few tokens found in GPU memory mean that it was evicted."""
        return cached_tokens < EVICTED_BELOW * self.reusable_tokens

    def found_below(self) -> bool:
        """Whether the lower tier had what was lost, as far as a tier may have it.

        It keeps chunks of its own size, and not the tail: most of the context counts.
        """
        in_memory = self.reusable_tokens - self.lost_tokens
        return not self.lost_its_kv(in_memory + self.reloaded_tokens)


def wait_kind(record: RequestRecord, cached_tokens: int, pin: Pin | None) -> str:
    """One of `metrics.WAIT_KINDS`."""
    if pin is not None:
        return "claimed"
    if not record.reusable_tokens:
        return "new"
    return "lost" if record.lost_its_kv(cached_tokens) else "cached"
