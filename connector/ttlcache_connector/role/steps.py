"""Events of the engine: its steps, and what is due before and after each."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING

from ttlcache_connector.engine import vllm_internals
from ttlcache_connector.engine.request_view import step_of
from ttlcache_connector.faults import guarded
from ttlcache_connector.tiers.base import TierEvents

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    from ttlcache.estimators.step_fit import Step
    from ttlcache_connector.role.parts import Parts
    from ttlcache_connector.role.status import EngineStatus
    from ttlcache_connector.role.teardown import Teardown
    from ttlcache_connector.tiers.base import TierMetadata


#: Environment: check reference accounting before every step (slow), for bug reports.
CHECK_INVARIANTS = "TTLCACHE_CHECK_INVARIANTS"


class StepEvents:
    """Before a step, its orders, what its workers did, its results; under a foreign
    scheduler as near to that as vLLM calls its connectors."""

    def __init__(self, parts: Parts, teardown: Teardown, status: EngineStatus) -> None:
        self._parts, self._teardown, self._status = parts, teardown, status
        self._controller, self._holder = parts.controller, parts.holder
        self._lower, self._above_tier = parts.lower, parts.above_tier
        self.faults, self._observes = parts.faults, parts.config.observes
        self._checks_invariants = bool(os.environ.get(CHECK_INVARIANTS))
        # Scheduled, results not there: two with async scheduling, a pipeline has more.
        self._steps: deque[tuple[SchedulerOutput, Step]] = deque(maxlen=64)

    @guarded()
    def before_step(self) -> None:
        """Expire pins; see which prefills are done."""
        self._teardown.release_if_off()
        self.put_back_failed_loads()
        self._holder.memory_is_short = False  # known anew when the head fails again
        if self._lower.is_configured:
            self._controller.tier_knowledge.on_reload_source(
                "cpu" if self._lower.is_up() else None
            )
            self.apply_tier_events()
        if self._checks_invariants:
            self._status.check_invariants()
        self._controller.tick()
        for request in self._parts.prefills.take_done():
            self._controller.on_prefilled(request.request_id)
        pins_hold = self._controller.retention_enabled and not self._observes
        if self._holder.states is not None and pins_hold:
            self._holder.states.before_step()

    @guarded()
    def on_paused(self, paused_s: float, *, all_stood: bool) -> None:
        """See `TTLConnector.on_paused`."""
        self._controller.on_paused(paused_s, all_stood=all_stood)

    @guarded()
    def put_back_failed_loads(self) -> None:
        if self._parts.engine.scheduler is not None:
            vllm_internals.put_back_failed_loads(self._parts.engine.scheduler)

    @guarded()
    def before_foreign_step(self) -> None:
        """Per-step work under a scheduler class that is not ours."""
        self._status.log_foreign_start()
        self.before_step()

    def build_metadata(self, output: SchedulerOutput) -> TierMetadata:
        """A step is scheduled: orders for the workers of the lower tier."""
        if self._parts.engine.scheduler is None:
            self.before_foreign_step()
        self.on_scheduled(output)
        metadata = self._lower.build_metadata(output)
        self.apply_tier_events()
        return metadata

    @guarded()
    def on_scheduled(self, output: SchedulerOutput) -> None:
        """A step begins, or waits for the one before it."""
        now_s = self._parts.clock.now_s()
        self._steps.append((output, step_of(output, self._parts.prefills, now_s)))

    @guarded()
    def on_step_end(self, output: SchedulerOutput | None = None) -> None:
        """The results of a step are there; None: of the oldest one under way."""
        for index, (scheduled, step) in enumerate(self._steps):
            if output is None or scheduled is output:
                for _ in range(index + 1):
                    self._steps.popleft()
                self._controller.on_step(step)
                return

    @guarded()
    def on_worker_output(self, output: KVConnectorOutput) -> None:
        """What the workers did in a step."""
        lower = self._lower
        lower.call(lower.tier.on_worker_output, None, output)
        self.apply_tier_events()

    @guarded()
    def apply_tier_events(self) -> None:
        """What happened in the lower tier since the last call."""
        lower, above_tier = self._lower, self._above_tier
        if above_tier is None:
            return
        events = lower.call(lower.tier.take_events, TierEvents())
        with contextlib.ExitStack() as last:  # one that raises keeps no other waiting
            for request_id in events.releasable:
                last.callback(above_tier.unpinned.on_releasable, request_id)
            for load in events.loaded:
                self._controller.tier_knowledge.on_load_finished(
                    load.request_id, load.tokens, load.seconds
                )
            for outcome in events.demotions:
                self._parts.count("demotions", outcome)
