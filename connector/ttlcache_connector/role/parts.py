"""The scheduler role of TTLConnector, in the engine's process: its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttlcache.clock import Clock
    from ttlcache.config import TTLCacheConfig
    from ttlcache.controller import Controller
    from ttlcache_connector.blocks.pinned import PinnedBlocks
    from ttlcache_connector.blocks.pins_above_tier import PinsAboveTier
    from ttlcache_connector.faults import Faults
    from ttlcache_connector.role.engine_link import EngineLink, Prefills
    from ttlcache_connector.role.requests import RequestEvents
    from ttlcache_connector.role.scheduling import SchedulingCallbacks
    from ttlcache_connector.role.status import EngineStatus
    from ttlcache_connector.role.steps import StepEvents
    from ttlcache_connector.role.teardown import Teardown
    from ttlcache_connector.tiers.guarded import GuardedTier


@dataclass(frozen=True)
class Parts:
    """What the objects of a role work on.

    holder: our references on the pool's blocks.
    above_tier: the same above a lower tier, None without one.
    lower: the lower tier; without one it finds nothing.
    faults: counts exceptions of all hooks, and ends retention after too many.
    """

    config: TTLCacheConfig
    clock: Clock
    controller: Controller
    holder: PinnedBlocks
    above_tier: PinsAboveTier | None
    lower: GuardedTier
    engine: EngineLink
    prefills: Prefills
    faults: Faults

    def count(self, name: str, label: str = "") -> None:
        """Counts a metric."""
        self.controller.telemetry.metrics.count(name, label)


@dataclass(frozen=True)
class SchedulerRole:
    """What vLLM's hooks call: events, questions, teardown.

    No method of these that a hook calls raises; those of `parts` may.
    """

    parts: Parts
    requests: RequestEvents
    steps: StepEvents
    scheduling: SchedulingCallbacks
    teardown: Teardown
    status: EngineStatus
