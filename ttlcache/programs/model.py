"""Programs, their finished turns, pins and requests: who is who, without any rule."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ttlcache.programs.fair_queueing import Place
from ttlcache.programs.prompt_fingerprint import PromptFingerprint
from ttlcache.types import GapKey, Hints, Rank, TurnFacts

if TYPE_CHECKING:
    from ttlcache.programs.divergence import Divergence

#: Awaited turns kept per program besides those whose next request waits already;
#: parallel branches beyond it lose the oldest.
MAX_AWAITED_TURNS = 16
#: (tenant, program id): an id is a label inside its tenant, never across. Of a program
#: without an id, a number, counted from a multiple of `ENGINE_KEYS`: no request of a
#: client can name that.
ProgramKey = tuple[str, str] | int
ENGINE_KEYS = 1 << 32
#: How such a program is shown: its engine and its number.
ANONYMOUS_ID = re.compile(r"anonymous-([0-9a-f]{1,8})-([0-9]{1,9})")
#: What an outline begins with: tokens of the head, and of the prompt.
OUTLINE_LENGTHS = struct.Struct("<II")


@dataclass(slots=True, eq=False)
class Turn:
    """A finished turn whose continuation has not arrived yet.

    num_hashes, last_hash: the prefix-cache hash of its last full block; hashes
        are chained, so equal hashes at one index mean equal tokens up to there.
    prompt_fingerprint: where its prompt ended; None of one below a block.
    hashes: the engine's own list with all of them, and maybe later ones; kept only
        while the turn is pinned.
    facts: what the policy was told, kept only while the turn is pinned.
    tier_generation: in which its KV was left to the lower tier, None if it never was.
    place: the place in the queue of requests that continue it.
    outline: of the context, see `ttlcache.programs.divergence`; empty for most turns.
    has_expired_pin: its pin expired, and no next turn has come so far.
    """

    gap_id: int
    finish_s: float
    gap_key: GapKey
    context_tokens: int
    num_hashes: int = 0
    last_hash: bytes = b""
    prompt_fingerprint: PromptFingerprint | None = None
    hashes: Sequence[bytes] = ()
    pin_id: int | None = None
    facts: TurnFacts | None = None
    tier_generation: int | None = None
    place: Place | None = None
    outline: bytes = b""
    has_expired_pin: bool = False

    @property
    def head_and_prompt_tokens(self) -> tuple[int, int]:
        """Of the conversation's first prompt, and of this turn's; 0 without outline."""
        if not self.outline:
            return 0, 0
        head_tokens, prompt_tokens = OUTLINE_LENGTHS.unpack_from(self.outline)
        return head_tokens, prompt_tokens

    def continued_by(self, hashes: Sequence[bytes], num_tokens: int) -> bool:
        """Whether a prompt extends this turn's whole context."""
        if self.num_hashes == 0:
            return num_tokens >= self.context_tokens
        if len(hashes) < self.num_hashes:
            return False
        return hashes[self.num_hashes - 1] == self.last_hash


@dataclass(slots=True)
class Work:
    """What one program's finished turns took.

    prompt_s: without the first prompt, which says nothing about later ones.
    first_s, last_s: when its first turn came, and when its latest one ended.
    forecasts: work done, and work left as expected then, after turns 1, 2, 4, 8, …
    """

    first_s: float = 0.0
    last_s: float = 0.0
    turns: int = 0
    prompt_s: float = 0.0
    output_s: float = 0.0
    forecasts: tuple[tuple[float, float], ...] = ()


@dataclass(slots=True, eq=False)
class Program:
    """One agent's job as this engine sees it.

    work: only under an ordering that uses it.
    last_turn: the last of its main conversation, with an outline; of a program that
        has an id. Side requests and sub-agents under that id do not change it.
    strayed: whether its latest turn left that conversation's context early.
    tenant: isolation domain, also of programs without an id; its pins share the
        cap with other tenants' pins.
    live_requests: those that wait or run.
    reuse_share: of its contexts, what its next turns found again.
    drops_outputs: whether its latest turn repeated the last prompt, not the output.
    place: of the context that its latest request continued or began.
    """

    key: ProgramKey
    place: Place
    parent: Program | None = None
    tenant: str = ""
    priority_class: int = 0
    has_started: bool = False  # a request of it got its memory
    turns_finished: int = 0
    live_requests: int = 0
    last_turn: Turn | None = None
    strayed: bool = False
    ended: bool = False
    last_seen_s: float = 0.0
    reuse_share: float = 1.0
    drops_outputs: bool = False
    awaited_turns: list[Turn] = field(default_factory=list)
    work: Work | None = None

    @property
    def program_id(self) -> str:
        if isinstance(self.key, int):
            return "anonymous-{:x}-{}".format(*divmod(self.key, ENGINE_KEYS))
        return self.key[1]

    @property
    def is_empty(self) -> bool:
        """Whether none of its requests has finished, and none is under way."""
        return not self.turns_finished and not self.live_requests

    def adopt(self, parent: Program) -> None:
        """Become a sub-agent of `parent`, which is maybe one itself."""
        if parent is self or parent.parent is self:
            return
        self.parent = parent


@dataclass(slots=True, eq=False)
class Pin:
    """A retained turn. `claimants` are requests in the queue that will claim it.

    priority_class: the program's when the pin was made; it orders the victims, so
        it must not follow a program whose later requests name another class.
    rank: where its program stood when the pin was made; the largest gives way first.
    quantum_used: its program's quantum was used up then: a claim is no protection.
    policy_deadline_s: beyond it only the client's own TTL keeps the pin, and waiting
        requests may take the memory.
    has_client_ttl: the client asked for a longer TTL than the policy.
    stall_until_s: before it an engine that has nothing to run waits rather than take
        the pin.
    min_blocks: with fewer it is not worth keeping, and goes as a whole.
    uncontended: its deadline was decided while no request waited for memory.
    yields_to_waiting: any request of its tenant that waits for memory may take it.
    stalled_from_s, stalled_until_s: when an engine with nothing to run first and last
        let a request wait rather than take the pin; None and 0 until it does.
    continued: its program's next turn has arrived, whether or not that claims it.
    """

    pin_id: int
    program: Program
    turn: Turn
    kv_blocks: int
    kv_tokens: int
    created_s: float
    deadline_s: float
    priority_class: int = 0
    rank: Rank = (0, 0)
    quantum_used: bool = False
    policy_deadline_s: float = math.inf
    has_client_ttl: bool = False
    stall_until_s: float = -math.inf
    min_blocks: int = 0
    uncontended: bool = False
    yields_to_waiting: bool = False
    stalled_from_s: float | None = None
    stalled_until_s: float = 0.0
    continued: bool = False
    claimants: set[str] = field(default_factory=set)

    @property
    def stalled_s(self) -> float:
        """For how long the engine ran nothing to wait for its program's next turn."""
        if self.stalled_from_s is None:
            return 0.0
        return max(0.0, self.stalled_until_s - self.stalled_from_s)

    @property
    def has_claimant(self) -> bool:
        """Whether the next turn is in the queue: such a pin does not expire."""
        return bool(self.claimants)


#: A return whose cache hit is below this share of its context lost its KV.
EVICTED_BELOW = 0.5


class Claim(NamedTuple):
    """A pin that a request took over.

    tokens: of its prompt, served from the pin.
    saved_tokens, saved_s: of those, what plain vLLM's prefix cache would have evicted,
        and the seconds of prefill that it would cost (`estimators.plain_cache`).
    is_real: not so under policy `observe`.
    """

    pin_id: int
    tokens: int
    saved_tokens: int
    saved_s: float
    is_real: bool = True


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
    stable_tokens: int = 0  # of its prompt, without the template's last ones
    head_tokens: int = 0  # main conversation's first prompt; 0 in a side request
    divergence: Divergence | None = None  # from its program's last context
    queue_place: int = 0  # where its program stood when it was queued, or moved back
    claim_counts: bool = True  # not while its program's quantum is used up
    work_delay_places: int = 0  # by which its program's work left puts it back
    reusable_tokens: int = 0  # context of the turn it continues that it repeats
    pin_id: int | None = None  # the pin it will claim
    lacks_memory_since_s: float | None = None  # when memory was first refused to it
    refused_for_growth: bool = False  # last refused although it would fit
    admitted_s: float | None = None
    tier_generation: int | None = None  # in which the turn it continues was left there
    asked_tier: bool = False  # for what GPU memory has not
    is_loading: bool = False  # from there
    lost_tokens: int = 0  # what it was asked for: lost when first admitted
    reloaded_tokens: int = 0  # what came back of that
    first_token_s: float | None = None

    def shift_times(self, seconds: float, now_s: float) -> None:
        """As if all that happened to it had happened so much later, at most now."""
        for name in ("queued_s", "lacks_memory_since_s", "admitted_s", "first_token_s"):
            at_s = getattr(self, name)
            if at_s is not None:
                setattr(self, name, min(now_s, at_s + seconds))

    def memory_wait_s(self, now_s: float) -> float:
        """For how long memory has been refused to it."""
        since_s = self.lacks_memory_since_s
        return 0.0 if since_s is None else now_s - since_s

    def lost_its_kv(self, cached_tokens: int) -> bool:
        """Whether so few tokens found in GPU memory mean that it was evicted."""
        return cached_tokens < EVICTED_BELOW * self.reusable_tokens

    def found_in_tier(self) -> bool:
        """Whether the lower tier had what was lost, as far as a tier may have it.

        It keeps chunks of its own size, and not the tail: most of the context counts.
        """
        in_memory = self.reusable_tokens - self.lost_tokens
        return not self.lost_its_kv(in_memory + self.reloaded_tokens)


def wait_kind(record: RequestRecord, cached_tokens: int, *, is_claim: bool) -> str:
    """`new` in its context, or a return: `claimed`, `cached` without a pin, `lost`."""
    if is_claim:
        return "claimed"
    if not record.reusable_tokens:
        return "new"
    return "lost" if record.lost_its_kv(cached_tokens) else "cached"
