"""What is known of the lower tier: whether it is there, what it kept, what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ttlcache.estimators.costs import CostModel
from ttlcache.programs.model import RequestRecord, Turn
from ttlcache.telemetry.events import Telemetry

#: Of what GPU memory gave up and a turn wanted again, what a tier has to have.
KEPT_SHARE = 0.95


@dataclass(slots=True)
class TierKnowledge:
    """Of the lower tier as a whole; which KV it holds, only the tier itself knows.

    name: the tier's in metrics: `lower_tier`.
    requests: those between arrival and finish.
    reload_source: under which the cost model learns its reloads, None while it is away.
    generation: counts up when what was copied there need not be there any more,
        though the tier has room: it was away, or everything was reset.
    """

    name: str
    requests: Mapping[str, RequestRecord]
    costs: CostModel
    telemetry: Telemetry
    reload_source: str | None = None
    generation: int = 0

    @property
    def keeps(self) -> bool:
        """Whether a context that leaves GPU memory will be there when it is wanted."""
        return self.reload_source is not None and self.costs.kept_share >= KEPT_SHARE

    # --- what an engine adapter says --------------------------------------

    def on_reload_source(self, source: str | None) -> None:
        """The tier answers, or does not (None)."""
        if source is not None and self.reload_source is None:
            self.on_new_generation()
        self.reload_source = source

    def on_new_generation(self) -> None:
        """What was copied there need not be there: it was away, or was reset."""
        self.generation += 1

    def on_lookup(self, request_id: str, chunk_tokens: int = 1) -> None:
        """It has looked for what GPU memory lacks of a waiting request.

        Args:
            chunk_tokens: it keeps whole chunks of so many, and no shorter context.
        """
        record = self.requests.get(request_id)
        if record is not None:
            record.asked_tier = record.reusable_tokens >= chunk_tokens

    def on_load_finished(self, request_id: str, tokens: int, seconds: float) -> None:
        """`tokens` of the prompt came, 0 where that failed: prefill what is left.

        seconds: from the order to the arrival of the last byte.
        """
        metrics = self.telemetry.metrics
        if tokens <= 0:
            metrics.count("failed_reloads")
            return
        record = self.requests.get(request_id)
        if record is not None:
            record.reloaded_tokens += tokens
        metrics.count("reloads", self.name)
        metrics.count("reloaded_tokens", self.name, by=tokens)
        metrics.observe("reload_seconds", seconds)
        if self.reload_source is not None:
            self.costs.observe_reload(self.reload_source, tokens, seconds)

    # --- what the controller says -----------------------------------------

    def on_turn_end(self, turn: Turn) -> None:
        """From now on the turn may be copied there."""
        if self.reload_source is not None:
            turn.tier_generation = self.generation

    def on_allocated(self, record: RequestRecord, cached_tokens: int) -> None:
        """A request was admitted: does what it lacks tell how much the tier keeps?

        Not where the tier never got the turn, was away since, or is not asked for it.
        """
        if self.reload_source is None or not record.asked_tier:
            return
        if record.tier_generation != self.generation:
            return
        if record.lost_its_kv(cached_tokens):
            record.lost_tokens = record.reusable_tokens - cached_tokens

    def on_prefilled(self, record: RequestRecord) -> None:
        """The prompt is computed: now it is known what the tier had of it."""
        if record.lost_tokens:
            self.costs.observe_lost(record.lost_tokens, record.found_in_tier())
