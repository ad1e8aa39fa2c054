"""Inside the LMCache server: what a worker never wrote is nobody's hit.

A worker gets slots, copies, and commits. LMCache 0.5 commits for a worker that left or
died in between: whatever lay in its slots would be read as KV from then on, by every
replica, and go to disk. A worker of ours leaves so whenever it ends during a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ttlcache_connector.log import logger

log = logger(__name__)

_NEEDED = ("_release_entry", "_pending_shm_writes", "_pending_shm_lock")


def forget_torn_stores(modules: Iterable[Any]) -> None:
    """Wrap what LMCache's transfer module does for a worker that is gone.

    Args:
        modules: LMCache's own; those that hand out no slots are left alone.
    """
    for module in modules:
        if all(hasattr(module, name) for name in _NEEDED):
            _wrap(module)
        elif type(module).__name__ == "EngineDrivenTransferModule":
            log.warning(
                "ttlcache: this LMCache's transfer module looks different: a store "
                "that a worker leaves half-way may be read as if it were whole"
            )


def _wrap(module: Any) -> None:
    release = module._release_entry  # noqa: SLF001 - no plugin point

    def released(instance_id: int, entry: Any) -> None:
        _forget(module, instance_id)
        release(instance_id, entry)

    module._release_entry = released  # noqa: SLF001


def _forget(module: Any, instance_id: int) -> None:
    """LMCache finds none of the worker's open stores afterwards.

    Their room stays reserved until the write TTL: a worker that was only thought dead
    may still write there, and nobody else's chunk must lie there then.
    """
    pending = module._pending_shm_writes  # noqa: SLF001
    with module._pending_shm_lock:  # noqa: SLF001
        torn = [key for key in pending if key[0] == instance_id]
        for key in torn:
            del pending[key]
    if torn:
        log.info("ttlcache: worker %d left %d stores half-way", instance_id, len(torn))
