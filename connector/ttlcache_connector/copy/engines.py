"""A transfer engine each way, for vLLM's tensors on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ttlcache.errors import TransferError
from ttlcache.transfer import Direction, ReferenceEngine, TransferEngine
from ttlcache.transfer.base import CLOSE_TIMEOUT_S
from ttlcache_connector.log import logger

if TYPE_CHECKING:
    import torch

    from ttlcache.transfer.host_memory import HostRanges

log = logger(__name__)


@dataclass(frozen=True)
class CopyEngines:
    """A load never waits for a store.

    host_ranges: the host memory that both may name; None: any.
    """

    stores: TransferEngine
    loads: TransferEngine
    host_ranges: HostRanges | None = None

    @property
    def name(self) -> str:
        return self.stores.name

    def engine(self, direction: Direction) -> TransferEngine:
        return self.stores if direction is Direction.STORE else self.loads

    def add_host(self, address: int, num_bytes: int, *, is_pinned: bool) -> None:
        """Host memory that copies name from now on; pins it if need be.

        Raises:
            TransferError: the device refuses to pin it.
        """
        if self.host_ranges is not None:
            (self.host_ranges.adopt if is_pinned else self.host_ranges.pin)(
                address, num_bytes
            )

    def forget_host(self, address: int) -> None:
        """Copies that name it are refused; when those under way ended it is unpinned.

        Where they do not end in time it stays pinned.
        """
        if self.host_ranges is None:
            return
        self.host_ranges.forget(address)
        if all(each.flush(CLOSE_TIMEOUT_S) for each in (self.stores, self.loads)):
            self.host_ranges.release(address)

    def close(self) -> None:
        """Copies under way finish, later ones fail."""
        have_ended = [self.stores.close(), self.loads.close()]
        if self.host_ranges is not None and all(have_ended):
            self.host_ranges.close()


def make_engines(device: torch.device) -> CopyEngines:
    """The engines for tensors on `device`, calibrated.

    Raises:
        TransferError: no engine of ours serves it.
    """
    if device.type == "cpu":
        return CopyEngines(ReferenceEngine(), ReferenceEngine())
    if device.type != "cuda":
        raise TransferError(f"no transfer engine for {device.type} tensors")
    from ttlcache.transfer.calibrate import calibrate
    from ttlcache.transfer.cupy_engine import CupyEngine
    from ttlcache.transfer.cupy_runtime import CupyRuntime
    from ttlcache.transfer.host_memory import HostRanges

    runtime = CupyRuntime(device.index or 0)
    ranking, host_ranges = calibrate(runtime), HostRanges(runtime)
    for method, why in ranking.faults.items():
        log.warning("ttlcache: copies by %s fail on this device: %s", method, why)
    stores, loads = (CupyEngine(runtime, host_ranges, ranking) for _ in Direction)
    return CopyEngines(stores, loads, host_ranges)
