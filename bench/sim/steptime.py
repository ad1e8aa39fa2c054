"""Seconds that one engine step takes: a roofline.

    step = max(FLOP / (peak * MFU), bytes / (bandwidth * MBU)) + overhead

FLOP of n new tokens that end at context c: 2 * params * n for the matrices, and
4 * layers * heads * head_dim * n * (c - n / 2) for attention (Q K and P V, causal).
Bytes: the weights once a step, and every scheduled context's KV once. Chunked
prefill needs no rule of its own: the scheduler says how many tokens a step has.

Where the constants come from: MFU 0.55 and MBU 0.80 are what FlashAttention-2
(arXiv 2307.08691, table of end-to-end training: 0.57-0.72 of an A100's peak) and
memory-bound decode kernels are reported to reach, rounded down; 4 ms are the launch,
sampling and scheduling time between steps, four times what the paper's Table 4 gives
for the scheduler alone. TP_EFFICIENCY stands for the all-reduces. None is fitted to
any result here, and every arm of a cell shares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.sim.hardware import Hardware
from bench.sim.models import BYTES_PER_NUMBER, Model

MFU = 0.55
MBU = 0.80
OVERHEAD_S = 0.004
TP_EFFICIENCY = 0.85


@dataclass(frozen=True, slots=True)
class StepTime:
    """Step seconds as linear functions of tokens and contexts.

    Coefficients, all seconds: token_s per new token; attend_s per new token and
    context token; weights_s per step; kv_s per context token read.
    """

    token_s: float
    attend_s: float
    weights_s: float
    kv_s: float

    @classmethod
    def of(cls, hardware: Hardware, model: Model) -> StepTime:
        gpus = model.tp * (TP_EFFICIENCY if model.tp > 1 else 1.0)
        flops = hardware.flops * MFU * gpus
        bandwidth = hardware.hbm * MBU * gpus
        attend = 4.0 * model.heads * model.head_dim / flops
        kv = model.kv_bytes_per_layer / bandwidth
        return cls(
            token_s=2.0 * model.params / flops,
            attend_s=attend * model.layers,
            weights_s=model.params * BYTES_PER_NUMBER / bandwidth,
            kv_s=kv * model.layers,
        )

    def seconds(self, scheduled: Sequence[tuple[int, float]]) -> float:
        """One step of (new tokens, context tokens after them) per request."""
        tokens = attended = context = 0.0
        for new, end in scheduled:
            tokens += new
            attended += new * (end - 0.5 * new)
            context += end
        return self._roofline(tokens, attended, context)

    def repeated(
        self, decodes: Sequence[int], chunk: tuple[int, int] | None = None
    ) -> Iterator[tuple[float, float]]:
        """Steps that follow each other with the same requests: one more token each.

        Token counts are whole numbers, so the sums are exact and every value equals
        `seconds` of the same step to the last bit.

        Args:
            decodes: context tokens of each decode after the first of the steps.
            chunk: new tokens of a prefill per step, and its context after the first.

        Yields:
            Seconds of each step, and those that it takes longer for the prefill.
        """
        count, context = len(decodes), float(sum(decodes))
        attended = context - 0.5 * count
        new, end = chunk or (0, 0)
        while True:
            alone_s = self._roofline(count, attended, context) if count else 0.0
            if not chunk:
                yield alone_s, 0.0
            else:
                seconds = self._roofline(
                    count + new, attended + new * (end - 0.5 * new), context + end
                )
                yield seconds, seconds - alone_s
            context += count
            attended += count
            end += new

    def _roofline(self, tokens: float, attended: float, context: float) -> float:
        compute_s = self.token_s * tokens + self.attend_s * attended
        memory_s = self.weights_s + self.kv_s * context
        return max(compute_s, memory_s) + OVERHEAD_S

    @property
    def decode_s(self) -> float:
        """One decode step of a single short context."""
        return self.weights_s + OVERHEAD_S

    def work_s(self, prompt: int, output: int) -> float:
        """Of turns alone on the engine, about: new prompt tokens, output tokens."""
        return prompt * self.token_s + output * self.decode_s

    def prefill_s(
        self, tokens: int, chunk_tokens: int, cached_tokens: int = 0
    ) -> float:
        """A prompt alone on the engine, in chunks."""
        seconds, done = 0.0, cached_tokens
        while done < tokens:
            new = min(chunk_tokens, tokens - done)
            done += new
            seconds += self.seconds([(new, done)])
        return seconds
