"""vLLM's own scheduler, writing down what each step computed and when.

How it is turned on: `STEP_LOG_SCHEDULER` in `bench.serve.server`. One JSON line a step:

    [start_s, end_s, [[request id, new tokens, tokens with KV after them], …]]

from the call of `schedule()` to the end of `update_from_output()`. Times are of
`time.monotonic`, the clock of all processes of a machine.
"""

from __future__ import annotations

import json
import os
import time
from typing import IO, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from bench.serve.server import STEP_LOG_VARIABLE


class LoggedScheduler(Scheduler):
    """Without asynchronous scheduling: a step ends before the next one begins."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log: IO[str] = open(  # noqa: SIM115 - for the engine's lifetime
            os.environ[STEP_LOG_VARIABLE], "w", buffering=1 << 16
        )
        self._start_s = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._start_s = time.monotonic()
        return super().schedule(*args, **kwargs)

    def update_from_output(self, output: SchedulerOutput, *args: Any) -> Any:
        rows = [
            (request_id, new, self.requests[request_id].num_computed_tokens)
            for request_id, new in output.num_scheduled_tokens.items()
            if request_id in self.requests
        ]
        done = super().update_from_output(output, *args)
        if rows:
            json.dump((self._start_s, time.monotonic(), rows), self._log)
            self._log.write("\n")
        if not self.requests:
            self._log.flush()  # nothing waits for it
        return done
