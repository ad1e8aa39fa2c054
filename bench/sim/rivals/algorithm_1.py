"""CacheTTL's Algorithm 1 and §5.2 by the letter: pins fall only when nothing runs.

A request that does not fit ends the step's admissions (lines 20-21), whatever is
pinned; the queue's order is the paper's, so nothing behind it passes. "When the
scheduling logic fails to schedule a new request" pins of the latest program fall until
the first request fits (§5.2, against deadlocks). A running request that lacks memory
is vLLM's affair, which preempts. Arm `cachettl-paper` reads that sentence as any step
that admits nobody.
"""

from __future__ import annotations

from bench.sim.rivals.paper_victims import PaperReclaimer, replace_reclaimer
from ttlcache.types import Urgency
from ttlcache_connector.connector import TTLConnector
from ttlcache_sim.gates import Gate
from ttlcache_sim.settings import Cell


class DeadlockReclaimer(PaperReclaimer):
    """Ends whole pins, the latest program's first, in an engine that stands still."""

    urgencies = frozenset({Urgency.STALLED})


def gate(cell: Cell, connector: TTLConnector | None) -> Gate:
    """Holds nobody; pins of this engine fall like that."""
    replace_reclaimer(connector, DeadlockReclaimer)
    return Gate()
