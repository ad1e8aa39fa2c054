"""What requests teach about costs: prefill, reloads, decoding, and a program's work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.step_fit import Step
from ttlcache.programs.model import RequestRecord, Work
from ttlcache.scheduling.remaining_work import RemainingWork
from ttlcache.telemetry.journal import NullJournal
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.types import Finish


@dataclass(slots=True)
class Learning:
    """Measures records of requests, and steps, and tells the models.

    requests: those between arrival and finish.
    """

    costs: CostModel
    work: RemainingWork
    metrics: MetricsBuffer
    journal: NullJournal
    requests: Mapping[str, RequestRecord]
    _step_ended_s: float = -math.inf

    def on_step(self, step: Step, now_s: float) -> None:
        """A step's results are there.

        It began when it was scheduled, or when the one before it ended: engines may
        schedule a step while another one runs.
        """
        seconds = now_s - max(step.start_s, self._step_ended_s)
        self._step_ended_s = now_s
        prompts_s = self.costs.observe_step(step, seconds)
        if prompts_s <= 0.0:
            return
        token_s = prompts_s / step.prompt_tokens
        for request_id, before, after in step.prompts:
            record = self.requests.get(request_id)
            if record is not None:
                record.prefill_s += token_s * (after - before)

    def prefilled(
        self, record: RequestRecord, prompt_tokens: int, now_s: float
    ) -> None:
        """The first output token is there."""
        if record.admitted_s is None or record.first_token_s is not None:
            return
        record.first_token_s = now_s
        if record.lost_tokens:
            self.costs.observe_lost(record.lost_tokens, record.found_below())
        self.journal.first_token(now_s, record, prompt_tokens)

    def reloaded(self, tier: str | None, tokens: int, seconds: float) -> None:
        """tier: None where it is not known from which one it came."""
        self.metrics.count("reloads", tier or "unknown")
        self.metrics.count("reloaded_tokens", tier or "unknown", by=tokens)
        self.metrics.observe("reload_seconds", seconds)
        if tier is not None:
            self.costs.observe_reload(tier, tokens, seconds)

    def finished(
        self, record: RequestRecord, finish: Finish, now_s: float, uses_work: bool
    ) -> None:
        """What the turn took of the engine, without waits and repeated prefills.

        Args:
            uses_work: whether anybody asks how much a program will still take.
        """
        outputs = finish.num_tokens - finish.prompt_tokens
        if record.first_token_s is not None and outputs > 1:
            decode_s = (now_s - record.first_token_s) / (outputs - 1)
            self.costs.observe_decode(decode_s)
        program = record.program
        if program.ended or not uses_work:
            return
        if program.work is None:
            program.work = Work()
        self.work.on_turn_finished(
            program.work,
            self.costs.prefill_s(finish.prompt_tokens, record.reusable_tokens),
            max(outputs, 0) * self.costs.decode_token_s,
        )
