"""The loop: vLLM's scheduler steps, a step-time model, a virtual clock.

    arrivals due → gate → add_request → schedule() → clock += step time
      → update_from_output() → finished turns → the next turn at finish + gap

A step in which nothing was scheduled is not idleness: the scheduler is asked again,
and time moves on, to the next event, only when asking again changed nothing.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from ttlcache.clock import VirtualClock
from ttlcache_connector.connector import TTLConnector
from ttlcache_sim.checks import SimulationError
from ttlcache_sim.events import EventQueue
from ttlcache_sim.gates import Gate
from ttlcache_sim.load.agents import Agent, InFlight, RequestFactory
from ttlcache_sim.load.feed import Feed
from ttlcache_sim.load.workload import Workload
from ttlcache_sim.recorder import Recorder
from ttlcache_sim.steps.steptime import StepTime
from ttlcache_sim.strides.foresight import Foresight
from ttlcache_sim.strides.stride import Plan, Strides
from ttlcache_sim.tiers.link import TierClient

#: Something may change without an event: look at least so often while requests wait and
#: nothing runs.
POLL_S = 1.0
#: Empty steps in a row without any change of time before the cell is called stuck.
MAX_EMPTY_STEPS = 10_000


class Simulation:
    """One cell. `run` returns when every program has finished."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: VirtualClock,
        workload: Workload,
        factory: RequestFactory,
        step_time: StepTime,
        recorder: Recorder,
        *,
        gate: Gate,
        connector: TTLConnector | None = None,
        tiers: TierClient | None = None,
        longest_stride: int = 1,
        block_tokens: int = 16,
    ) -> None:
        """
        Args:
            longest_stride: most steps that one call of `schedule()` stands for.
            block_tokens: of a KV block.
        """
        self._scheduler = scheduler
        self._clock = clock
        self._factory = factory
        self._step_time = step_time
        self._recorder = recorder
        self._gate = gate
        self._role = connector.scheduler_role if connector is not None else None
        self._tiers = tiers
        self._foresight = Foresight(scheduler, connector)
        self._strides = Strides(
            scheduler,
            step_time,
            longest_stride,
            block_tokens,
            self._foresight,
        )
        agents = [Agent(*numbered) for numbered in enumerate(workload.programs)]
        self._arrivals: EventQueue[Agent] = EventQueue()
        self._feed = Feed(agents, workload.loop)
        for agent in self._feed.first:
            self._expect(agent, agent.program.arrival_s)
        self._left = len(agents)
        self._live: dict[str, InFlight] = {}
        self._empty: tuple[Any, ...] | None = None
        self._empty_steps = 0

    def run(self) -> None:
        """Serve all programs.

        Raises:
            SimulationError: requests wait, nothing runs, and nothing will change.
        """
        while self._left:
            self.advance()
        self._recorder.rollout_steps = self._feed.steps

    def advance(self) -> None:
        """One call of `schedule()`, or to the next event where nothing is queued."""
        now_s = self._clock.now_s()
        self._deliver(now_s)
        if not self._live:
            self._advance_to(self._next_event_s(), "nothing is queued")
            return
        plan = self._strides.plan(now_s, self._events_s())
        self._strides.before_call()
        output = self._schedule(plan)
        # Of an empty step, too: it may have preempted somebody, and freed much.
        self._strides.observe(output, 1 if plan is None else plan.steps)
        if output.total_num_scheduled_tokens:
            self._empty, self._empty_steps = None, 0
            self._step(output, plan)
        else:
            self._empty_step(output)

    def _deliver(self, now_s: float) -> None:
        while (due := self._arrivals.pop_due(now_s)) is not None:
            _, agent = due
            self._submit(self._gate.arrive(agent, now_s))
        self._submit(self._gate.tick(now_s))

    def _submit(self, agents: list[Agent]) -> None:
        for agent in agents:
            request = self._factory.build(agent, self._clock.now_s())
            self._live[request.request_id] = InFlight(agent, request)
            self._strides.disturb()
            self._scheduler.add_request(request)

    def _schedule(self, plan: Plan | None) -> SchedulerOutput:
        """One call of vLLM's own; it must schedule what was planned."""
        if plan is None:
            return self._scheduler.schedule()
        self._strides.begin(plan)
        try:
            output = self._scheduler.schedule()
        finally:
            self._strides.end()
        if output.num_scheduled_tokens != plan.tokens:
            raise SimulationError(
                f"a stride of {plan.steps} steps was planned as {plan.tokens}, "
                f"scheduled as {output.num_scheduled_tokens}"
            )
        return output

    def _step(self, output: SchedulerOutput, plan: Plan | None) -> None:
        """One call of `schedule()`: one step, or those of a plan."""
        live = self._live
        start_s = self._clock.now_s()
        steps = plan.steps if plan is not None else 1
        for data in output.scheduled_new_reqs:
            entry = live[data.req_id]
            if entry.scheduled_s is None:
                entry.scheduled_s = start_s
                entry.cached_tokens = data.num_computed_tokens
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            entry = live[request_id]
            tokens = 0 if entry.request.is_prefill_chunk else steps
            sampled.append([entry.agent.token] * tokens)
        times = plan.times if plan is not None else (self._seconds(output),)
        pinned = self._pinned_blocks()
        for seconds, prefill_s in times:
            self._recorder.step(seconds, prefill_s, pinned)
            self._clock.advance(seconds)
        self._update(output, ids, sampled)
        self._collect(ids)

    def _seconds(self, output: SchedulerOutput) -> tuple[float, float]:
        """Of one step, and what it takes longer for the prompt tokens in it."""
        decodes: list[tuple[int, float]] = []
        prefills: list[tuple[int, float]] = []
        for request_id, new in output.num_scheduled_tokens.items():
            request = self._live[request_id].request
            is_decode = new == 1 and request.num_output_tokens > 0
            own = decodes if is_decode else prefills
            own.append((new, request.num_computed_tokens))
        seconds = self._step_time.seconds(prefills + decodes)
        if not prefills:
            return seconds, 0.0
        alone_s = self._step_time.seconds(decodes) if decodes else 0.0
        return seconds, seconds - alone_s

    def _update(
        self, output: SchedulerOutput, ids: list[str], sampled: list[list[int]]
    ) -> None:
        arrived: set[str] = set()
        if self._tiers is not None:
            arrived = self._tiers.take_arrived(self._clock.now_s())
        if arrived:
            self._strides.disturb()
        self._scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={rid: i for i, rid in enumerate(ids)},
                sampled_token_ids=sampled,
                kv_connector_output=(
                    KVConnectorOutput(finished_recving=arrived) if arrived else None
                ),
            ),
        )

    def _collect(self, ids: list[str]) -> None:
        now_s = self._clock.now_s()
        for request_id in ids:
            entry = self._live[request_id]
            if entry.first_token_s is None and entry.request.num_output_tokens:
                entry.first_token_s = now_s
            if entry.request.is_finished():
                del self._live[request_id]
                self._strides.disturb()
                self._finish(entry, now_s)

    def _finish(self, entry: InFlight, now_s: float) -> None:
        agent, request = entry.agent, entry.request
        assert entry.first_token_s is not None
        assert entry.scheduled_s is not None
        self._recorder.turn(
            agent,
            request,
            first_token_s=entry.first_token_s,
            departure_s=now_s,
            scheduled_s=entry.scheduled_s,
            cached_tokens=entry.cached_tokens,
        )
        agent.service_s = now_s - entry.scheduled_s
        released = self._gate.finish(agent, now_s)
        if agent.is_last:
            self._left -= 1
            self._program_ended(agent, now_s)
        else:
            gap_s = agent.current.gap_s
            agent.context_tokens = request.num_tokens
            agent.turn += 1
            self._expect(agent, now_s + gap_s)
        self._submit(released)

    def _expect(self, agent: Agent, time_s: float) -> None:
        """A turn is sent then; it comes once the frontend has read it."""
        agent.start_s = time_s
        agent.come_s = time_s + self._step_time.request_s(agent.prompt_tokens)
        self._arrivals.push(agent.come_s, agent)

    def _program_ended(self, agent: Agent, now_s: float) -> None:
        steps = self._feed.steps
        for following in self._feed.ended(agent):
            self._expect(following, now_s)
        if self._feed.steps > steps:
            self._update_weights()

    def _update_weights(self) -> None:
        """New weights: no KV is worth anything, that of stragglers neither."""
        self._strides.disturb()
        self._scheduler.reset_prefix_cache(reset_running_requests=True)

    # --- time ----------------------------------------------------------------

    def _empty_step(self, output: SchedulerOutput) -> None:
        self._recorder.empty_steps += 1
        self._update(output, [], [])
        state = self._state()
        if state != self._empty:
            self._empty = state
            self._empty_steps += 1
            if self._empty_steps > MAX_EMPTY_STEPS:
                raise SimulationError(f"{MAX_EMPTY_STEPS} empty steps: {state}")
            return
        self._empty_steps = 0
        now_s = self._clock.now_s()
        known = [t for t in self._events_s() if t is not None and t > now_s]
        if not known and not self._scheduler.running:
            raise SimulationError(f"wedged, nothing will change: {state}")
        self._advance_to(min([*known, now_s + POLL_S]), "polling")

    def _state(self) -> tuple[Any, ...]:
        scheduler = self._scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return (
            self._clock.now_s(),
            pool.get_num_free_blocks(),
            scheduler.get_request_counts(),
            len(scheduler.finished_recving_kv_req_ids),
            self._pinned_blocks(),
        )

    def _advance_to(self, time_s: float | None, why: str) -> None:
        if time_s is None:
            raise SimulationError(
                f"{self._left} programs are left, {why} and no event is due"
            )
        idle_s = max(0.0, time_s - self._clock.now_s())
        self._recorder.idle(idle_s, self._pinned_blocks())
        self._clock.advance(idle_s)
        if self._clock.now_s() < time_s:  # rounding: events must come due
            self._clock.set(time_s)

    def _next_event_s(self) -> float | None:
        loaded_s = self._tiers.next_s() if self._tiers is not None else None
        times = (self._arrivals.next_s(), self._gate.next_s(), loaded_s)
        return min((t for t in times if t is not None), default=None)

    def _events_s(self) -> list[float | None]:
        """Everything that time alone brings."""
        tick_s = self._gate.next_tick_s()
        return [self._next_event_s(), tick_s, *self._foresight.deadlines()]

    def _pinned_blocks(self) -> int:
        if self._role is None:
            return 0
        return self._role.parts.holder.pressure().pinned_blocks
