"""The retention policy's TTL of idle programs, from the gaps recorded here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from ttlcache import policies
from ttlcache.estimators.costs import CostModel, MemoryPrice
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.estimators.survival import SlidingMean
from ttlcache.policies.base import View
from ttlcache.types import Decision, Pressure, TurnFacts
from ttlcache_lmcache.config import ServerModuleConfig
from ttlcache_lmcache.retention.program_table import ChainProgram
from ttlcache_lmcache.retention.residency import Residency
from ttlcache_lmcache.retention.return_estimator import ReturnEstimator

#: Called with the name of what failed and what it raised.
OnError = Callable[[str, BaseException], None]

_WINDOW = 1000


class TierCosts(CostModel):
    """The core's costs with another price of memory.

    In GPU memory, KV that is held back delays requests. In L1 nobody waits for memory:
    a context that stays only displaces another, whose loss costs B once per gap. So

        price = mean B / mean gap,

    in seconds of recovery per second of holding. Under it a program is worth keeping
    while it is likelier to return in the next second than the average program. It
    holds whether L1 is full or not, because a TTL is read only when it is: by the
    eviction, and by the sweep above `demote_above`. 0 until the first gap ended.
    """

    def __init__(self, profile: Mapping[str, object] | None = None) -> None:
        super().__init__(profile)
        self._benefit_s = SlidingMean(_WINDOW)
        self._gap_s = SlidingMean(_WINDOW)

    def observe_benefit(self, recovery_s: float) -> None:
        self._benefit_s.observe(recovery_s)

    def observe_gap(self, gap_s: float) -> None:
        self._gap_s.observe(gap_s)

    def memory_price(self, pressure: Pressure, kv_blocks: float) -> MemoryPrice:
        gap_s = self._gap_s.value
        per_s = self._benefit_s.value / gap_s if gap_s > 0.0 else 0.0
        return MemoryPrice(per_s, 1.0)


class TtlAdvisor:
    """The core's policy, history and costs, asked about chains. Not thread-safe."""

    def __init__(
        self,
        config: ServerModuleConfig,
        costs: TierCosts,
        residency: Residency,
        counts: Counter[str],
        on_error: OnError,
    ) -> None:
        self._policy = policies.create(config.policy, config.policy_options)
        self._gaps = GapHistory(horizon_s=config.program_idle_s)
        self.returns = ReturnEstimator(self._gaps)
        self._costs = costs
        self._residency = residency
        self._counts = counts
        self._on_error = on_error

    @property
    def gaps_recorded(self) -> int:
        return self._gaps.total

    def gap_begins(self, program: ChainProgram, now_s: float) -> None:
        self._gaps.start(program.number, program.gap_key, now_s)

    def gap_ends(self, program: ChainProgram, now_s: float) -> None:
        """The program's next turn is here: learn from how long it was away."""
        gap_s = self._gaps.finish(program.number, now_s)
        if gap_s is None:
            return
        self._costs.observe_gap(gap_s)
        self.returns.observe_gap(gap_s)

    def no_gap(self, program: ChainProgram) -> None:
        """No turn follows: nothing to learn from."""
        self._gaps.drop(program.number)

    def ask(self, program: ChainProgram, now_s: float, waited_s: float) -> Decision:
        """For how long the program is worth keeping; 0 if the policy fails."""
        leaf = program.chain[-1] if program.chain else None
        in_l2 = leaf is not None and self._residency.is_in_l2(leaf)
        turn = TurnFacts(
            program_id=str(program.number),
            turn_index=program.turns,
            gap_key=program.gap_key,
            context_tokens=program.context_tokens,
            kv_blocks=len(program.chain),
            waited_s=waited_s,
        )
        view = View(
            gaps=self._gaps,
            costs=self._costs,
            now_s=now_s,
            tier="disk" if in_l2 else None,
        )
        if waited_s == 0.0:
            self._costs.observe_benefit(view.recovery_s(turn))
        try:
            decision = self._policy.decide(turn, view)
        except Exception as error:  # noqa: BLE001 - policies may be anybody's code
            self._failed(error)
            return Decision(0.0, "policy:raised")
        return decision if decision.ttl_s >= 0 else Decision(0.0, "policy:nonsense")

    def _failed(self, error: BaseException) -> None:
        self._counts["policy_errors"] += 1
        self._on_error("policy", error)

    def reloaded(self, tokens: int, seconds: float) -> None:
        """So many tokens came up from L2."""
        self._costs.observe_reload("disk", tokens, seconds)
