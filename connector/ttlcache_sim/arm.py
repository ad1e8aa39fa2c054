"""An arm of the simulator: vLLM alone, or with TTLConnector and TTLScheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ttlcache.config import (
    admission_in_force,
    load_config,
    max_wait_in_force,
    ordering_in_force,
)
from ttlcache_sim.gates import Gate

if TYPE_CHECKING:
    from ttlcache_connector.connector import TTLConnector
    from ttlcache_sim.settings import Cell

Extra = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Arm:
    """How an arm differs from plain vLLM.

    source: where it comes from.
    extra: connector settings, or what makes them (`extra_config`); None: no connector.
    tell_work: requests say how much work their program has left, as vLLM's priority.
    tell_gap: clients announce the exact length of each gap.
    """

    name: str
    source: str
    extra: Extra | Callable[[float], Extra] | None = None
    tell_work: bool = False
    tell_gap: bool = False

    def extra_config(self, mean_prefill_s: float) -> dict[str, Any] | None:
        """Connector settings; seconds to prefill the workload's mean context, alone,
        are all that an arm may know beforehand, like the paper's offline profile.
        """
        extra = self.extra(mean_prefill_s) if callable(self.extra) else self.extra
        return None if extra is None else dict(extra)

    def engine_config(
        self, mean_prefill_s: float, *, above_tier: bool
    ) -> dict[str, Any] | None:
        """The same, above a simulated tier as above LMCache."""
        extra = self.extra_config(mean_prefill_s)
        if extra is None or not above_tier:
            return extra
        return spelled_out(extra, above_tier=True)

    def new_gate(self, cell: Cell, connector: TTLConnector | None) -> Gate:
        """What stands before the engine of a cell."""
        return Gate()


def spelled_out(extra: Extra, *, above_tier: bool, policy: str = "") -> dict[str, Any]:
    """The settings with what "auto" stands for in them.

    It depends on the policy's name and on the tier, and the simulated tier is not known
    to it.

    Args:
        policy: in place of the settings' own, which decides what "auto" stands for.
    """
    config = load_config(extra)
    if above_tier:
        config = config.model_copy(update={"lower_tier": "lmcache"})
    return {
        **extra,
        "policy": policy or config.policy,
        "ordering": ordering_in_force(config),
        "admission": admission_in_force(config),
        "max_queue_wait_s": max_wait_in_force(config),
    }
