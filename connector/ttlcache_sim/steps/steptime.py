"""Seconds that one engine step takes: measured on a server, or a roofline.

Both are functions of four sums over a step's requests: its new tokens; the pairs of
new and earlier tokens that attention computes, n * (c - n / 2) for n new tokens that
end at context c; the tokens of all contexts that it reads; and 1. Chunked prefill
needs no rule of its own: the scheduler says how many tokens a step has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ttlcache_sim.steps.hardware import Hardware
from ttlcache_sim.steps.models import BYTES_PER_NUMBER, Model


class StepTime(ABC):
    """What a step costs, from what the scheduler put into it.

    token_s: seconds per new token of a prompt, attention left out.
    """

    token_s: float

    @abstractmethod
    def of_sums(self, tokens: float, pairs: float, context: float) -> float:
        """Seconds of a step of so many new tokens, pairs, and context tokens read."""

    def request_s(self, prompt_tokens: int) -> float:
        """What a request takes outside the engine's steps."""
        return 0.0

    def seconds(self, scheduled: Sequence[tuple[int, float]]) -> float:
        """One step of (new tokens, context tokens after them) per request."""
        return self.of_sums(*sums(scheduled))

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
        pairs = context - 0.5 * count
        new, end = chunk or (0, 0)
        while True:
            alone_s = self.of_sums(count, pairs, context) if count else 0.0
            if not chunk:
                yield alone_s, 0.0
            else:
                seconds = self.of_sums(
                    count + new, pairs + new * (end - 0.5 * new), context + end
                )
                yield seconds, seconds - alone_s
            context += count
            pairs += count
            end += new

    def work_s(self, prompt: int, output: int) -> float:
        """Of turns alone on the engine, about: new prompt tokens, output tokens."""
        return prompt * self.token_s + output * self.of_sums(0, 0, 0)

    def prefill_s(self, tokens: int, chunk_tokens: int) -> float:
        """A prompt alone on the engine, in chunks."""
        seconds, done = 0.0, 0
        while done < tokens:
            new = min(chunk_tokens, tokens - done)
            done += new
            seconds += self.seconds([(new, done)])
        return seconds


def sums(scheduled: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """New tokens, pairs and context tokens of (new, context after them) pairs."""
    tokens = pairs = context = 0.0
    for new, end in scheduled:
        tokens += new
        pairs += new * (end - 0.5 * new)
        context += end
    return tokens, pairs, context


MFU = 0.55
MBU = 0.80
OVERHEAD_S = 0.004
TP_EFFICIENCY = 0.85


@dataclass(frozen=True, slots=True)
class Roofline(StepTime):
    """For hardware that nobody measured.

        step = max(FLOP / (peak * MFU), bytes / (bandwidth * MBU)) + overhead

    FLOP: 2 * params a new token for the matrices, and 4 * layers * heads * head_dim a
    pair for attention (Q K and P V, causal). Bytes: the weights once a step, and every
    scheduled context's KV once.

    Where the constants come from: MFU 0.55 and MBU 0.80 are what FlashAttention-2
    (arXiv 2307.08691, table of end-to-end training: 0.57-0.72 of an A100's peak) and
    memory-bound decode kernels are reported to reach, rounded down; 4 ms are the
    launch, sampling and scheduling time between steps, four times what the paper's
    Table 4 gives for the scheduler alone. TP_EFFICIENCY stands for the all-reduces.
    None is fitted to any result here, and every arm of a cell shares them.

    Coefficients, all seconds: token_s per new token; pair_s per pair; weights_s per
    step; kv_s per context token read.
    """

    token_s: float
    pair_s: float
    weights_s: float
    kv_s: float

    @classmethod
    def of(cls, hardware: Hardware, model: Model) -> Roofline:
        gpus = model.tp * (TP_EFFICIENCY if model.tp > 1 else 1.0)
        flops = hardware.flops * MFU * gpus
        bandwidth = hardware.hbm * MBU * gpus
        pair = 4.0 * model.heads * model.head_dim / flops
        kv = model.kv_bytes_per_layer / bandwidth
        return cls(
            token_s=2.0 * model.params / flops,
            pair_s=pair * model.layers,
            weights_s=model.params * BYTES_PER_NUMBER / bandwidth,
            kv_s=kv * model.layers,
        )

    def of_sums(self, tokens: float, pairs: float, context: float) -> float:
        compute_s = self.token_s * tokens + self.pair_s * pairs
        memory_s = self.weights_s + self.kv_s * context
        return max(compute_s, memory_s) + OVERHEAD_S
