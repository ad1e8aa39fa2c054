"""`ttlcache estimate`: will it help me?"""

from __future__ import annotations

from rich.console import Console

from ttlcache_sim.estimate.plan import EstimateOptions
from ttlcache_sim.estimate.report import report


def estimate(options: EstimateOptions, console: Console) -> None:
    """Your own sessions in vLLM's scheduler, with and without ttlcache: no GPU."""
    report(options, console)
