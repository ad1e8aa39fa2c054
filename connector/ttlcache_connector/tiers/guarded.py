"""The scheduler's half of the lower tier, fail-open: a broken tier is a miss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ttlcache_connector.faults import Faults, guarded
from ttlcache_connector.log import logger
from ttlcache_connector.tiers.base import (
    Loaded,
    Reload,
    SchedulerTier,
    TierMetadata,
    TurnEnd,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logger(__name__)


class GuardedTier:
    """Guards every call; sees the tier go and come back."""

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
        self.is_set = type(tier) is not SchedulerTier
        self._count = count
        self._was_up = True
        self.faults = Faults(
            lambda hook: count("hook_errors", hook), self._turn_off, now_s
        )
        # Loads promised to vLLM: of this step, and those that could not be ordered.
        self._ordered: dict[str, list[int]] = {}
        self._abandoned: dict[str, list[int]] = {}

    @guarded(fallback=False)
    def is_up(self) -> bool:
        """Whether anything can be stored or loaded; counts and logs changes."""
        if not self.is_set or self.tier.is_off:
            return False
        up = self.tier.is_up()
        if up != self._was_up:
            self._was_up = up
            if up:
                log.warning("ttlcache: the lower tier answers again")
            else:
                self._count("tier_outages", "")
                log.warning(
                    "ttlcache: the lower tier does not answer; pins go on, what they "
                    "lose is prefilled meanwhile"
                )
        return up

    @guarded()
    def blocks_are_named(self, names: list[str]) -> None:
        self.tier.blocks_are_named(names)

    @guarded()
    def tier_arrive(self, request: Request, *, has_pin: bool) -> None:
        if self.is_up():
            self.tier.arrive(request, has_pin=has_pin)

    def match(
        self, request: Request, hit_tokens: int, stored_tokens: float = math.inf
    ) -> tuple[int | None, bool]:
        """Tokens to load beyond the local hit; None means ask again."""
        if not self.is_set or self.tier.is_off:
            return 0, False
        found = self._match(request, hit_tokens, stored_tokens)
        return (0, False) if found is None else found

    @guarded()
    def _match(
        self, request: Request, hit_tokens: int, stored_tokens: float
    ) -> tuple[int | None, bool]:
        return self.tier.match(request, hit_tokens, stored_tokens)

    @guarded(fallback=False)
    def was_looked_up(self, request_id: str) -> bool:
        """Whether `match` really looked."""
        return not self.tier.is_off and self.tier.was_looked_up(request_id)

    def allocated(
        self, request: Request, blocks: KVCacheBlocks, loaded_tokens: int
    ) -> None:
        """Blocks were allocated, for `loaded_tokens` of which the tier loads KV."""
        if not self.is_set:
            return
        if loaded_tokens:
            ids = [i for group in blocks.get_block_ids() for i in group]
            self._ordered[request.request_id] = ids
        try:
            self.tier.allocated(request, blocks, loaded_tokens)
        except Exception:  # noqa: BLE001 - the serving path fails open
            self.faults.record("tier_allocated")
            self._abandon(request.request_id)

    def build_metadata(self, output: SchedulerOutput) -> TierMetadata:
        """Orders for the workers."""
        if not self.is_set:
            return TierMetadata()
        try:
            metadata = self.tier.build_metadata(output)
        except Exception:  # noqa: BLE001 - the serving path fails open
            self.faults.record("tier_build_metadata")
            metadata = TierMetadata()
            for request_id in list(self._ordered):
                self._abandon(request_id)
        metadata.abandoned, self._abandoned = self._abandoned, {}
        self._ordered = {}
        return metadata

    @guarded()
    def tier_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        self.tier.finished(request, block_ids)

    @guarded()
    def report_turn(self, turn: TurnEnd) -> None:
        if self.is_up():
            self.tier.report_turn(turn)

    @guarded(fallback=())
    def take_settled(self) -> list[str]:
        return self.tier.take_settled()

    @guarded(fallback=())
    def take_events(self) -> list[str]:
        return self.tier.take_events()

    @guarded(fallback=())
    def worker_output(self, output: KVConnectorOutput) -> list[Loaded]:
        return self.tier.worker_output(output)

    @guarded(fallback=())
    def reloads(self) -> list[Reload]:
        return self.tier.reloads()

    @guarded(fallback=False)
    def has_work(self) -> bool:
        return self.tier.has_work()

    @guarded(fallback=False)
    def reset(self) -> bool:
        return self.tier.reset()

    @guarded()
    def tier_shutdown(self) -> None:
        self.tier.shutdown()

    def _abandon(self, request_id: str) -> None:
        blocks = self._ordered.pop(request_id, None)
        if blocks is not None:
            self._abandoned[request_id] = blocks

    def _turn_off(self) -> None:
        self.tier.turn_off()
        log.warning(
            "ttlcache: nothing is demoted to the lower tier or loaded from it any more"
        )
