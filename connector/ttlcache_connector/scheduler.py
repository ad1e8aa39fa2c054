"""vLLM's schedulers with a program queue and pins that give way.

`schedule()` stays vLLM's own. We replace the queue, expire pins before each
step, time it, and let the connector's guard handle failed allocations.
"""

from __future__ import annotations

from typing import Any, cast

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from ttlcache.clock import default_clock
from ttlcache_connector.connector import TTLConnector, find_connector
from ttlcache_connector.queue import ProgramQueue


class ProgramScheduling:
    """Mixed in before a vLLM scheduler class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        connector = find_connector(self.connector)  # type: ignore[attr-defined]
        if connector is None:
            raise ValueError(
                f"{type(self).__name__} needs TTLConnector: start the server with "
                """--kv-transfer-config '{"kv_connector":"TTLConnector","""
                """"kv_role":"kv_both"}'"""
            )
        self._ttl: TTLConnector = connector
        self.waiting = ProgramQueue(connector, default_clock().now_s)
        # vLLM defers frees: a step in flight may overwrite a load.
        if self.connector is connector and connector.may_free_at_once():  # type: ignore[attr-defined]
            self.defer_block_free = False
        self._pause_state_since_s = default_clock().now_s()
        connector.attach_scheduler(cast(Scheduler, self), self.waiting)

    def add_request(self, request: Request) -> None:
        # Before queueing: the queue needs to know the program.
        self._ttl.on_new_request(request)
        super().add_request(request)  # type: ignore[misc]

    def set_pause_state(self, pause_state: PauseState) -> None:
        now_s, was = default_clock().now_s(), self.pause_state  # type: ignore[attr-defined]
        if was is not PauseState.UNPAUSED:
            paused_s = now_s - self._pause_state_since_s
            self.waiting.on_paused(paused_s)
            self._ttl.on_paused(paused_s, all_stood=was is PauseState.PAUSED_ALL)
        self._pause_state_since_s = now_s
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def get_kv_cache_usage(self) -> float:
        """What requests use: balancers and routers would take pins for load."""
        usage: float = super().get_kv_cache_usage()  # type: ignore[misc]
        return max(0.0, usage - self._ttl.retained_share())

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats: SchedulerStats | None = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None:
            stats.kv_cache_usage = self.get_kv_cache_usage()
        return stats

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._ttl.before_step()
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.waiting.on_step_end()
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        # Before requests end: what they took is known then.
        self._ttl.after_step(scheduler_output)
        return super().update_from_output(  # type: ignore[misc]
            scheduler_output, *args, **kwargs
        )


# Our queue stands where vLLM's stood.
class TTLScheduler(ProgramScheduling, Scheduler):  # type: ignore[misc]
    """For `async_scheduling` off."""


class AsyncTTLScheduler(ProgramScheduling, AsyncScheduler):  # type: ignore[misc]
    """For `async_scheduling` on."""
