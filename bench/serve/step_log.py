"""vLLM's own scheduler, writing down what each step computed and when.

How it is turned on: `STEP_LOG_SCHEDULER` in `bench.serve.server`. One JSON line a step:

    [start_s, end_s, [[request id, new tokens, tokens with KV after them], …]]

from the call of `schedule()` to the end of its `update_from_output()`; with
asynchronous scheduling the next step starts before that. Times are of
`time.monotonic`, the clock of all processes of a machine.
"""

from __future__ import annotations

import json
import os
import time
from typing import IO, Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from bench.serve.server import STEP_LOG_VARIABLE

#: vLLM's default where nobody names a scheduler; on a CPU it has no asynchronous one.
_Default: Any = Scheduler if current_platform.is_cpu() else AsyncScheduler


class LoggedScheduler(_Default):  # type: ignore[misc]
    """Changes nothing of what it inherits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log: IO[str] = open(  # noqa: SIM115 - for the engine's lifetime
            os.environ[STEP_LOG_VARIABLE], "w", buffering=1 << 16
        )
        # The output is kept, so that no other one gets its id.
        self._open: dict[int, tuple[SchedulerOutput, float, list[Any]]] = {}

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        start_s = time.monotonic()
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        rows = [
            (request_id, new, self.requests[request_id].num_computed_tokens)
            for request_id, new in output.num_scheduled_tokens.items()
        ]
        if rows:
            self._open[id(output)] = output, start_s, rows
        return output

    def update_from_output(self, output: SchedulerOutput, *args: Any) -> Any:
        done = super().update_from_output(output, *args)
        if id(output) in self._open:
            _, start_s, rows = self._open.pop(id(output))
            json.dump((start_s, time.monotonic(), rows), self._log)
            self._log.write("\n")
        if not self.requests:
            self._log.flush()  # nothing waits for it
        return done
