"""Several engine steps in one call of `schedule()`, where that changes nothing.

Between two events (a turn comes, a turn ends, a pin expires, a gate's tick) an
engine repeats itself: everybody decodes one token, and at most one prompt goes on by
what is left of the step's token budget. k such steps are one call with k times the
budget, in which every decode brings k - 1 draft tokens (vLLM's speculative decoding)
that all turn out right. The real scheduler allocates the real blocks for k steps.

It is exact, not an approximation: the step times are those of the k single steps and
are added one by one, the stride ends with the step in which the next event comes due,
and the engine checks that vLLM scheduled what was planned. What has to hold:

- free blocks cover the growth, so that nobody is preempted and no pin gives way;
- nobody finishes, and no prompt is done, inside;
- a prompt that takes all of the budget left, so that no waiting request is looked at;
  or no prompt, and the waiting requests were refused by the step before, by lack of
  memory or by admission control. They stay refused, because free memory only shrinks
  and nothing else that admission control reads changes without an event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from ttlcache_sim.steps.steptime import StepTime
from ttlcache_sim.strides.foresight import Foresight


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next call of `schedule()` stands for.

    times: seconds of each step, and those of them due to a prefill.
    tokens: what vLLM has to schedule, by request.
    """

    times: tuple[tuple[float, float], ...]
    tokens: dict[str, int]

    @property
    def steps(self) -> int:
        return len(self.times)


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one step would schedule. chunk: tokens of `prefill` a step."""

    decodes: list[Request]
    prefill: Request | None
    chunk: int


class Strides:
    """Plans the calls of `schedule()` of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        step_time: StepTime,
        longest: int,
        block_tokens: int,
        foresight: Foresight,
    ) -> None:
        """
        Args:
            longest: never more steps than this; 1 turns strides off.
        """
        self._scheduler = scheduler
        self._step_time = step_time
        self._longest = longest
        self._block_tokens = block_tokens
        self._foresight = foresight
        self._state: tuple[float, ...] = ()
        self._budget = scheduler.max_num_scheduled_tokens
        self._asked = False  # whether the waiting requests were refused just now
        self._called_s = -1.0

    def disturb(self) -> None:
        """A request came, went, or can go on."""
        self._asked = False

    def before_call(self) -> None:
        """The connector's state that waiting requests are about to be refused in."""
        self._state = self._foresight.state()

    def observe(self, output: SchedulerOutput, steps: int) -> None:
        """What the last call did; call before its finished turns are handled.

        Pins that gave way for a request that was refused nevertheless may be enough
        together with others when it asks again. And a prompt's end teaches what its
        lower tier had, on which the bound on waiting depends.
        """
        cached = output.scheduled_cached_reqs
        tokens = output.total_num_scheduled_tokens
        self._asked = (
            tokens < steps * self._budget
            and tokens == steps * len(output.num_scheduled_tokens)
            and not output.scheduled_new_reqs
            and not cached.resumed_req_ids
            and not output.preempted_req_ids
            and self._foresight.state() == self._state
        )

    def plan(self, now_s: float, events: Iterable[float | None]) -> Plan | None:
        """A stride of at least two steps, or None for a step as always.

        Args:
            events: when something will happen; what the last call has seen is past.
        """
        called_s, self._called_s = self._called_s, now_s
        if self._longest == 1:
            return None
        due = [time_s for time_s in events if time_s is not None and time_s > called_s]
        until_s = min(due, default=None)
        if until_s is not None and until_s <= now_s:
            return None
        batch = self._batch()
        if batch is None:
            return None
        most = self._most_steps(batch)
        if most < 2:
            return None
        times = self._times(batch, most, now_s, until_s)
        if len(times) < 2:
            return None
        tokens = {r.request_id: len(times) for r in batch.decodes}
        if batch.prefill is not None:
            tokens[batch.prefill.request_id] = len(times) * batch.chunk
        return Plan(times, tokens)

    def begin(self, plan: Plan) -> None:
        """Prepare the scheduler for the call."""
        self._set_budget(plan.steps * self._budget)
        for request in self._scheduler.running:
            if plan.tokens.get(request.request_id) == plan.steps and _decodes(request):
                request.spec_token_ids = [0] * (plan.steps - 1)

    def end(self) -> None:
        """After the call."""
        self._set_budget(self._budget)

    # --- inside ----------------------------------------------------------------

    def _set_budget(self, tokens: int) -> None:
        self._scheduler.max_num_scheduled_tokens = tokens
        self._scheduler.scheduler_config.max_num_batched_tokens = tokens

    def _batch(self) -> _Batch | None:
        """In the order of the running list: vLLM gives the budget away in it."""
        budget = self._budget
        decodes: list[Request] = []
        for request in self._scheduler.running:
            if budget == 0:
                break
            if _decodes(request):
                decodes.append(request)
                budget -= 1
                continue
            if request.num_tokens - request.num_computed_tokens <= budget:
                return None  # this prompt's last chunk
            return _Batch(decodes, request, budget)
        _, num_waiting = self._scheduler.get_request_counts()
        if not decodes or budget == 0 or (num_waiting and not self._asked):
            return None
        return _Batch(decodes, None, 0)

    def _most_steps(self, batch: _Batch) -> int:
        most = self._longest
        for request in batch.decodes:
            # The last token comes in a step of its own: it caches the last block.
            most = min(most, request.max_tokens - request.num_output_tokens - 1)
        if batch.prefill is not None:
            prompt = batch.prefill
            left = prompt.num_tokens - prompt.num_computed_tokens - 1
            most = min(most, left // batch.chunk)
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        while most > 1 and self._new_blocks(batch, most) > free:
            most //= 2
        return most

    def _new_blocks(self, batch: _Batch, steps: int) -> int:
        size = self._block_tokens
        needed = sum(
            -(-(r.num_computed_tokens + steps) // size) + -r.num_computed_tokens // size
            for r in batch.decodes
        )
        if batch.prefill is not None:
            done = batch.prefill.num_computed_tokens
            needed += -(-(done + steps * batch.chunk) // size) + -done // size
        return needed

    def _times(
        self, batch: _Batch, most: int, now_s: float, until_s: float | None
    ) -> tuple[tuple[float, float], ...]:
        """Of the steps up to the one in which the next event comes due."""
        chunk = None
        if batch.prefill is not None:
            chunk = (batch.chunk, batch.prefill.num_computed_tokens + batch.chunk)
        ends = [request.num_computed_tokens + 1 for request in batch.decodes]
        times: list[tuple[float, float]] = []
        for pair in islice(self._step_time.repeated(ends, chunk), most):
            times.append(pair)
            now_s += pair[0]
            if until_s is not None and now_s >= until_s:
                break
        return tuple(times)


def _decodes(request: Request) -> bool:
    return (
        request.num_output_tokens > 0
        and request.num_tokens - request.num_computed_tokens == 1
    )
