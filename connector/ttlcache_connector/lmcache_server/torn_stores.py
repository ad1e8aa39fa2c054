"""Inside the LMCache server: what a worker never wrote is nobody's hit.

A worker gets slots, copies, and commits. LMCache 0.5 commits for a worker that left or
died in between: whatever lay in its slots would be read as KV from then on, by every
replica, and go to disk. A worker of ours leaves so whenever it ends during a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from ttlcache_connector.log import logger
from ttlcache_lmcache import internals

log = logger(__name__)


def forget_torn_stores(modules: Iterable[Any]) -> None:
    """Change what LMCache's transfer module does for a worker that is gone.

    Args:
        modules: LMCache's own; those that hand out no slots are left alone.
    """
    for module in modules:
        if internals.hands_out_slots(module):
            internals.on_worker_gone(module, partial(_forget, module))
        elif type(module).__name__ == "EngineDrivenTransferModule":
            log.warning(
                "ttlcache: this LMCache's transfer module looks different: a store "
                "that a worker leaves half-way may be read as if it were whole"
            )


def _forget(module: Any, instance_id: int) -> None:
    if torn := internals.drop_open_stores(module, instance_id):
        log.info("ttlcache: worker %d left %d stores half-way", instance_id, torn)
