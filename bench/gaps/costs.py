"""What a lost context costs in `python -m bench gaps`: stated, never learnt.

The default curve is Llama-3.1-8B on one A100, derived from arithmetic alone:

    linear     2 flop a weight and token. 6.98e9 weights are multiplied: 8.03e9 of
               the model card less 2 * 0.525e9 of the embedding table (a look-up)
               and the output layer (the last token only).
    quadratic  attention, causal: 2 * hidden * layers flop a pair of tokens
               (Q K' and its product with V are 4 * hidden each, half of them
               masked), hidden 4096, 32 layers.
    speed      half of the A100's 312 Tflop/s in bf16 (NVIDIA's data sheet).
    constant   10 ms for scheduling and launching.

so P(n) = 8.95e-5 n + 1.68e-9 n^2 + 0.01 seconds: 1.9 s at 16k, 42 s at 131k tokens.
Recorded contexts beyond the model's window (131,072 tokens; a quarter of
weka_claude_code's turns) are extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass

from ttlcache.estimators.costs import CostModel
from ttlcache.types import Pressure

_FLOP_PER_TOKEN = 2 * 6.98e9
_FLOP_PER_PAIR = 2 * 4096 * 32
_FLOP_PER_S = 0.5 * 312e12
LLAMA_8B_A100 = (_FLOP_PER_TOKEN / _FLOP_PER_S, _FLOP_PER_PAIR / _FLOP_PER_S, 0.01)


@dataclass(frozen=True, slots=True)
class CostSetting:
    """The prices at which decisions are asked for and scored.

    prefill: of a recovery, s a token, s a token^2, s.
    queueing_delay_s: T, of an evicted return.
    price: seconds of others' delay a second of holding.
    running_tokens: of running requests (InferCept's C_other).
    """

    prefill: tuple[float, float, float] = LLAMA_8B_A100
    queueing_delay_s: float = 5.0
    price: float = 1.0
    running_tokens: int = 100_000

    def model(self) -> StatedCosts:
        return StatedCosts(self)

    def pressure(self, block_tokens: int) -> Pressure:
        """A pool without end, so that no cap interferes with a policy."""
        running = self.running_tokens // block_tokens
        return Pressure(pool_blocks=_ENDLESS, free_blocks=_ENDLESS - running)


_ENDLESS = 1 << 40


class StatedCosts(CostModel):
    """`CostModel` with a fixed curve, T and price: outcomes do not move them."""

    def __init__(self, setting: CostSetting) -> None:
        super().__init__({"prefill": list(setting.prefill)})
        self.flat_price = setting.price
        super().observe_return_wait(setting.queueing_delay_s)

    def observe_return_wait(self, wait_s: float) -> None:
        """Stated, not learnt."""

    def memory_price(self, pressure: Pressure, kv_blocks: float) -> None:
        """The paper's bargain: T and the price are stated."""

    def benefit_s(self, context_tokens: int) -> float:
        """B: seconds that a return loses when its KV is gone."""
        return self.queueing_delay_s + self.recovery_s(context_tokens)
