"""The CPU tier in the box: KV blocks in pinned host memory of the worker process.

The scheduler's half knows exactly what is there; the worker's half copies.
"""

from ttlcache_connector.tiers.cpu.scheduler import CPUSchedulerTier
from ttlcache_connector.tiers.cpu.support import unsupported_reason
from ttlcache_connector.tiers.cpu.worker import CPUWorkerTier

__all__ = ["CPUSchedulerTier", "CPUWorkerTier", "unsupported_reason"]
