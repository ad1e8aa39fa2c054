"""The scheduler's half of the lower tier, fail-open: a broken tier is a miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ttlcache_connector.faults import Faults, guarded
from ttlcache_connector.log import logger
from ttlcache_connector.tiers.base import Match, SchedulerTier, TierMetadata, TurnEnd

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F")


class GuardedTier:
    """Guards every call; sees the tier go and come back.

    What needs no more than the guard goes through `call`.
    """

    def __init__(
        self,
        tier: SchedulerTier,
        count: Callable[[str, str], None],
        now_s: Callable[[], float],
    ) -> None:
        """
        Args:
            count: counts a metric by name and label.
        """
        self.tier = tier
        self.is_configured = type(tier) is not SchedulerTier
        self._count = count
        self._was_up = True
        self.faults = Faults(
            lambda hook: count("hook_errors", hook), self._turn_off, now_s
        )
        # Loads promised to vLLM: of this step, and those that could not be ordered.
        self._ordered: set[str] = set()
        self._abandoned: set[str] = set()

    @guarded(fallback=False)
    def is_up(self) -> bool:
        """Whether anything can be stored or loaded; counts and logs changes."""
        if not self.is_configured:
            return False
        up = not self.tier.is_off and self.tier.is_up()
        if up != self._was_up:
            self._was_up = up
            if up:
                log.warning("ttlcache: the lower tier answers again")
            else:
                self._count("tier_outages", "")
                log.warning("ttlcache: the lower tier does not answer; pins go on")
        return up

    def call(
        self, hook: Callable[P, R], fallback: F, /, *args: P.args, **kwargs: P.kwargs
    ) -> R | F:
        """A method of the tier; `fallback` where it raises, counted under its name."""
        try:
            return hook(*args, **kwargs)
        except Exception:  # noqa: BLE001 - the serving path fails open
            self.faults.record(f"tier_{hook.__name__}")
            return fallback

    def match(
        self, request: Request, hit_tokens: int, lookup_limit_tokens: float
    ) -> Match:
        """As `SchedulerTier.match`; nothing from a tier that is off."""
        if self.tier.is_off:
            return Match()
        return self.call(
            self.tier.match, Match(), request, hit_tokens, lookup_limit_tokens
        )

    def report_turn(self, turn: TurnEnd) -> None:
        """As `TierDemotions.report_turn`, while the tier answers."""
        if self.is_up():
            self.call(self.tier.demotions.report_turn, None, turn)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, external_tokens: int
    ) -> None:
        """Blocks were allocated, for `external_tokens` of which the tier loads KV."""
        if not self.is_configured:
            return
        if external_tokens:
            self._ordered.add(request.request_id)
        hook = self.tier.update_state_after_alloc
        if self.call(hook, True, request, blocks, external_tokens):  # it raised
            self._abandon(self._ordered & {request.request_id})

    def build_metadata(self, output: SchedulerOutput) -> TierMetadata:
        """Orders for the workers."""
        if not self.is_configured:
            return TierMetadata()
        metadata = self.call(self.tier.build_metadata, None, output)
        if metadata is None:
            metadata = TierMetadata()
            self._abandon(self._ordered - self._abandoned)
        metadata.abandoned, self._abandoned = self._abandoned, set()
        self._ordered = set()
        return metadata

    def _abandon(self, request_ids: set[str]) -> None:
        """Before the next orders are built: none of these may be among them."""
        self._abandoned |= request_ids
        self.call(self.tier.abandon, None, request_ids)

    def _turn_off(self) -> None:
        self.tier.is_off = True
        log.warning("ttlcache: the lower tier is off from now on")
