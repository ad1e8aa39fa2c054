"""What one engine's controller knows: its tables and its estimators.

Written by the parts that own an event (`ttlcache.arrivals`, `ttlcache.departures`, the
controller); policies see it as a `View`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ttlcache.clock import Clock
from ttlcache.config import TTLCacheConfig
from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.estimators.lru_backlog import Backlog
from ttlcache.estimators.survival import Memoryfulness
from ttlcache.policies.base import View
from ttlcache.programs.model import RequestRecord
from ttlcache.programs.table import ProgramTable
from ttlcache.retention.pins import PinTable
from ttlcache.scheduling.remaining_work import RemainingWork
from ttlcache.telemetry.journal import NullJournal
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.types import BlockHolder, Decision


@dataclass(slots=True)
class Tables:
    """One per controller.

    block_tokens: tokens per prefix-cache hash.
    retention_enabled: False once retention is turned off for good.
    lower_tier: the tier that an expired turn's KV goes to, None while there is none.
    lower_epoch: counts up when what went there before need not be there any more,
        though the tier has room: it was away, or everything was reset.
    last_decision: what the policy said of the request that finished last, None where it
        was not asked: nobody continues such a turn, or nothing is retained.
    backlog: of plain vLLM, for what counts as saved.
    """

    config: TTLCacheConfig
    clock: Clock
    holder: BlockHolder
    block_tokens: int
    gaps: GapHistory
    costs: CostModel
    journal: NullJournal
    programs: ProgramTable
    metrics: MetricsBuffer
    memoryfulness: Memoryfulness = field(default_factory=Memoryfulness)
    work: RemainingWork = field(default_factory=RemainingWork)
    pins: PinTable = field(default_factory=PinTable)
    requests: dict[str, RequestRecord] = field(default_factory=dict)
    retention_enabled: bool = True
    lower_tier: str | None = None
    lower_epoch: int = 0
    last_decision: Decision | None = None
    backlog: Backlog = field(init=False)

    def __post_init__(self) -> None:
        self.backlog = Backlog(self.clock)

    def view(self, now_s: float) -> View:
        """What a policy may know now."""
        return View(
            self.gaps,
            self.costs,
            self.memoryfulness.eta,
            self.memoryfulness.avg_turns,
            self.holder.pressure(),
            now_s,
            self.lower_tier,
            self.config.demote == "write-through",
        )
