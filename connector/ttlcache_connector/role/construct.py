"""Builds the scheduler role of one engine: all of it, or nothing."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

from ttlcache.clock import default_clock
from ttlcache.config import TTLCacheConfig, ordering_in_force
from ttlcache.controller import Controller
from ttlcache.estimators.costs import CostModel
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache_connector.blocks.pinned import PinnedBlocks, usable_blocks
from ttlcache_connector.blocks.pins_above_tier import PinsAboveTier
from ttlcache_connector.blocks.recurrent_states import RecurrentStates
from ttlcache_connector.blocks.unpinned_turns import UnpinnedTurns
from ttlcache_connector.engine import requirements
from ttlcache_connector.engine.tool_reader import OutputReader
from ttlcache_connector.faults import Faults
from ttlcache_connector.role.allocate_slots import (
    AllocationGuard,
    groups_of,
)
from ttlcache_connector.role.engine_link import EngineLink, Prefills
from ttlcache_connector.role.parts import Parts, SchedulerRole
from ttlcache_connector.role.recording import open_telemetry
from ttlcache_connector.role.requests import RequestEvents
from ttlcache_connector.role.scheduling import SchedulingCallbacks
from ttlcache_connector.role.status import EngineStatus
from ttlcache_connector.role.steps import StepEvents
from ttlcache_connector.role.teardown import Teardown, turn_off
from ttlcache_connector.tiers.guarded import GuardedTier
from ttlcache_connector.tiers.registry import TIERS
from ttlcache_lmcache import compat

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from ttlcache_connector.connector import TTLConnector


class SchedulerRoleBuilder:
    """What can be had before there is a pool: files are read, settings are refused.

    Raises:
        ConfigError: a file or a setting, at start.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, config: TTLCacheConfig
    ) -> None:
        self._config, self._vllm_config = config, vllm_config
        self._clock = default_clock()
        self._metrics = MetricsBuffer()
        self._reader = (
            OutputReader(vllm_config.model_config, config.tool_call_parser)
            if config.reads_outputs
            else None
        )
        self._lower = GuardedTier(
            TIERS[config.lower_tier].scheduler_half(
                config, vllm_config, kv_cache_config
            ),
            self._metrics.count,
            self._clock.now_s,
        )
        step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._costs = CostModel(step_tokens=step_tokens)
        by_request = ordering_in_force(config) == "request-fcfs"
        self.engine = EngineLink(vllm_config.scheduler_config, by_request=by_request)

    def bind(self, manager: KVCacheManager, connector: TTLConnector) -> SchedulerRole:
        """The role over the engine's pool; from now on turns are retained.

        Args:
            connector: asked where an allocation fails.

        Raises:
            ConfigError: a policy or a folder for recordings that cannot be used.
        """
        parts = self._parts(manager)
        teardown = Teardown(parts)
        status = EngineStatus(parts, teardown, self._vllm_config.scheduler_config)
        role = SchedulerRole(
            parts,
            RequestEvents(parts, self._reader),
            StepEvents(parts, teardown, status),
            SchedulingCallbacks(parts, teardown, groups_of(manager)),
            teardown,
            status,
        )
        AllocationGuard(
            manager, connector, parts.engine, parts.prefills, teardown
        ).install()
        return role

    def _parts(self, manager: KVCacheManager) -> Parts:
        pool, lower, engine = manager.block_pool, self._lower, self.engine
        sizes = [group.block_tokens for group in groups_of(manager)]
        states = RecurrentStates.of(manager)
        above_tier: PinsAboveTier | None = None
        if lower.is_configured:
            lower.tier.bind(manager)
            demotions = lower.tier.demotions
            unpinned = UnpinnedTurns(
                pool,
                demotions,
                self._clock,
                self._metrics.count,
                copies_at_once=self._config.demote == "on-expiry",
            )
            above_tier = PinsAboveTier(
                pool,
                sizes,
                engine.queue_counts,
                unpinned,
                demotions,
                lower.report_turn,
                states,
            )
        holder = above_tier or PinnedBlocks(
            pool, sizes, engine.queue_counts, states=states
        )
        controller = Controller(
            self._config,
            self._clock,
            holder,
            block_tokens=pool.hash_block_size,
            costs=self._costs,
            on_rekey=engine.rekey,
            on_client_ended_program=None
            if above_tier is None
            else above_tier.on_client_ended_program,
            telemetry=open_telemetry(
                self._config, self._clock, self._metrics, self._about(pool)
            ),
            engine_id=secrets.randbits(24),
        )
        faults = Faults(
            partial(self._metrics.count, "hook_errors"),
            partial(turn_off, controller, holder),
            self._clock.now_s,
        )
        return Parts(
            self._config,
            self._clock,
            controller,
            holder,
            above_tier,
            lower,
            engine,
            Prefills(),
            faults,
        )

    def _about(self, pool: BlockPool) -> dict[str, Any]:
        """Head of a recording."""
        return {
            "model": str(getattr(self._vllm_config.model_config, "model", "")),
            "vllm": requirements.vllm_version(),
            "ttlcache": compat.ttlcache_version(),
            "block_tokens": pool.hash_block_size,
            "pool_blocks": usable_blocks(pool),
        }
