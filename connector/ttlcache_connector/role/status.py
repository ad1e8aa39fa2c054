"""The log line at start, `/metrics` and `/ttlcache/…`: what operators see of a role."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ttlcache import control
from ttlcache.config import admission_in_force, ordering_in_force
from ttlcache_connector.blocks.pinned import usable_blocks
from ttlcache_connector.engine import requirements
from ttlcache_connector.faults import guarded
from ttlcache_connector.log import logger
from ttlcache_connector.role.invariants import leaked_blocks, violations
from ttlcache_connector.role.metrics import TTLConnectorStats
from ttlcache_connector.tiers.base import Fill
from ttlcache_lmcache import compat

if TYPE_CHECKING:
    from ttlcache_connector.role.parts import Parts
    from ttlcache_connector.role.teardown import Teardown

log = logger(__name__)

#: Gauges are sent at least this often while the engine steps.
GAUGE_INTERVAL_S = 1.0
#: Events are sent at once when the engine comes to rest, and at most this often while
#: requests run: turns end at nearly every step, and to send costs more than to count.
EVENT_INTERVAL_S = 0.1


class EngineStatus:
    """What one engine tells: metrics, control answers, its line at start."""

    def __init__(self, parts: Parts, teardown: Teardown, scheduler_config: Any) -> None:
        self._parts, self._teardown = parts, teardown
        self._controller, self._holder = parts.controller, parts.holder
        self._scheduler_config = scheduler_config
        self.faults = parts.faults
        # Read from files: not at every question of a client.
        self._versions = {
            "ttlcache": compat.ttlcache_version(),
            "vllm": requirements.vllm_version(),
        }
        self._gauges_sent_s = float("-inf")
        self._started = False

    def log_start(self, scheduler_name: str) -> None:
        """The one line that says what runs."""
        self._started = True
        config, pool_blocks = self._parts.config, usable_blocks(self._holder.pool)
        settings = self._settings()
        log.info(
            "ttlcache %s on vLLM %s: policy=%s%s ordering=%s admission=%s "
            "max_pinned_fraction=%g (%s of %s blocks) max_ttl_s=%g scheduler=%s "
            "async_scheduling=%s lower_tier=%s",
            settings["ttlcache"],
            settings["vllm"],
            config.policy,
            config.policy_options or "",
            settings["ordering"],
            settings["admission"],
            config.max_pinned_fraction,
            int(config.max_pinned_fraction * pool_blocks),
            pool_blocks,
            config.max_ttl_s,
            scheduler_name,
            self._scheduler_config.async_scheduling,
            f"{config.lower_tier} demote={config.demote}"
            if self._parts.lower.is_configured
            else "none",
        )

    def log_foreign_start(self) -> None:
        """The same, once, under a scheduler class that is not ours."""
        if not self._started:
            self.log_start(self._scheduler_config.get_scheduler_cls().__name__)

    @guarded(fallback={})
    def control(self, order: dict[str, Any]) -> dict[str, Any]:
        """Orders of clients and operators, see `ttlcache.control`."""
        self._controller.tick()
        now_s = self._parts.clock.now_s()
        answer: dict[str, Any] = control.obey(self._controller, order, now_s)
        if order.get("do") == "programs":
            answer["settings"] = self._settings()
        return answer | {"gauges": self._gauges()}

    @guarded()
    def take_stats(self) -> TTLConnectorStats | None:
        """What happened since the last call; None when there is nothing to say."""
        metrics = self._controller.telemetry.metrics
        if metrics.is_empty():
            interval_s = GAUGE_INTERVAL_S
        else:
            busy = self._parts.engine.num_running()
            interval_s = EVENT_INTERVAL_S if busy else 0.0
        now_s = self._parts.clock.now_s()
        if now_s - self._gauges_sent_s < interval_s:
            return None
        gauges = self._gauges()  # may fail: then nothing was drained yet
        if gauges["leaked_blocks"]:
            self._teardown.drop_orphans()  # the gauge is what it found
        self._gauges_sent_s = now_s
        return TTLConnectorStats(data=metrics.drain() | {"gauges": gauges})

    def check_invariants(self) -> None:
        """For tests and for doubts: O(blocks in use) a step."""
        scheduler = self._parts.engine.scheduler
        if scheduler is None:
            return
        broken = violations(scheduler, self._controller, self._holder)
        if broken:
            self._parts.count("hook_errors", "invariants")
            log.error("ttlcache: broken invariants: %s", "; ".join(broken[:5]))

    def _settings(self) -> dict[str, Any]:
        """The configuration with what is in force where it says "auto"; versions.

        Any client may ask: of a path it is told only that it is set.
        """
        config, by_program = self._parts.config, self._parts.engine.by_program
        in_force = {
            "ordering": ordering_in_force(config),
            "admission": admission_in_force(config) if by_program else "none",
            "lower_tier": config.lower_tier
            if self._parts.lower.is_configured
            else "none",
        }
        shown = config.model_dump() | in_force | self._versions
        return shown | ({} if config.record_path is None else {"record_path": "set"})

    def _gauges(self) -> dict[str, float]:
        pressure, above_tier = self._holder.pressure(), self._parts.above_tier
        unpinned = above_tier.unpinned if above_tier else None
        lower = self._parts.lower
        fill = lower.call(lower.tier.fill, Fill())
        return self._controller.gauges() | {
            "pinned_blocks": pressure.pinned_blocks,
            "free_blocks": pressure.free_blocks,
            "pool_blocks": pressure.pool_blocks,
            "demoting_blocks": 0 if unpinned is None else unpinned.awaiting_copy_blocks,
            "lingering_blocks": 0 if unpinned is None else unpinned.lingering_blocks,
            "leaked_blocks": leaked_blocks(
                self._parts.engine.scheduler, self._controller, self._holder
            ),
            "tier_up": float(lower.is_up()),
            "tier_used_bytes": fill.used_bytes,
            "tier_budget_bytes": fill.budget_bytes,
        }
