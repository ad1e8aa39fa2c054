"""TTLConnector whose insides throw once in ten calls, and whose policy has moods.

Selected by `kv_connector_module_path`; production code knows nothing of it. The test
talks to the server's processes through a folder: each throw appends a byte to a file
of the point's name, and files tell the moods.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from injection import AFTER, BEFORE, FOLDER_VARIABLE, OBSERVE, POINTS, Injector

from ttlcache.policies.base import Policy, View
from ttlcache.types import Decision, TurnFacts
from ttlcache_connector import faults
from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.role.metrics import TTLPromMetrics

EVERY = 10
faults.MAX_FAULTS = 1_000_000  # the test counts them: they turn nothing off
#: vLLM's own set, which its scheduler reads, too: tests/connector has it.
NOT_OURS = {"failed_loads"}
#: Points that exist only once the scheduler has introduced itself.
_OF_THE_QUEUE = {
    name for name, (path, *_) in POINTS.items() if path == "parts.engine._queue"
}
#: Answers of the policy by mood.
ANSWERS = {"nan": float("nan"), "negative": -1.0, "huge": 1e308}
SLOW_S = 1.0


def _folder() -> Path:
    return Path(os.environ[FOLDER_VARIABLE])


def _note(point: str) -> None:
    with (_folder() / point).open("a") as file:
        file.write("x")


class _Faults(Injector):
    """Throws while no file "off" is there."""

    #: Counts that were drained and not handed on are lost, those of throws among them.
    before_only = frozenset({"drain"})

    def __init__(self) -> None:
        super().__init__(EVERY, _note, (BEFORE, AFTER))

    @property
    def is_on(self) -> bool:
        return not (_folder() / "off").exists()

    @is_on.setter
    def is_on(self, value: bool) -> None:
        pass


class MoodyPolicy(Policy):
    """The real policy, unless a file "mood" says otherwise."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = policy.name

    def decide(self, turn: TurnFacts, view: View) -> Decision:
        try:
            mood = (_folder() / "mood").read_text()
        except FileNotFoundError:
            return self._policy.decide(turn, view)
        if mood == "raise":
            raise ZeroDivisionError("a policy of somebody")
        if mood == "text":
            return "five minutes"  # type: ignore[return-value]
        if mood == "slow":
            time.sleep(SLOW_S)
            return self._policy.decide(turn, view)
        return Decision(ANSWERS[mood], mood)


class FaultyPromMetrics(TTLPromMetrics):
    """Throws in the API server after every tenth report, so that none is lost."""

    _faults = None

    def _observe(self, transfer_stats_data: dict[str, Any], engine_idx: int) -> None:
        super()._observe(transfer_stats_data, engine_idx)
        if self._faults is None:
            self._faults = _Faults()
        self._faults.wrap(OBSERVE, lambda: None)()


class FaultyTTLConnector(TTLConnector):
    """Throws below every guard."""

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._faults = _Faults()
        for point in POINTS:
            if point not in _OF_THE_QUEUE | NOT_OURS:
                self._faults.install(self.scheduler_role, point)
        retention = self.scheduler_role.parts.controller.retention
        retention.policy = MoodyPolicy(retention.policy)

    def attach_scheduler(self, scheduler: Any, queue: Any) -> None:
        super().attach_scheduler(scheduler, queue)
        for point in _OF_THE_QUEUE:
            self._faults.install(self.scheduler_role, point)

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> FaultyPromMetrics:
        return FaultyPromMetrics(*args, **kwargs)
