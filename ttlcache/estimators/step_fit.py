"""What prompt tokens cost, from the seconds of the engine's steps.

    step = a tokens + b pairs + base + decode_s * decode tokens

tokens: of prompts, computed in the step; pairs: the sum of (after^2 - before^2) over
these prompts, for attention. `base` is what any step takes, for the most part loading
the weights. A step's time belongs to all that it computes: fitted together, the few
tokens of a claimed turn take nothing of a long prompt's chunk beside them.

An engine that schedules ahead launches a step before it fetches the results of the one
before. Launching a prompt takes a CPU long (on an H200, run eagerly, 40 of the 47 ms of
1,000 tokens): for so long the step before seems to last, and the prompt seems free. The
two together took what was seen. Where all steps are such launches and none is long,
what a long one takes cannot be known from them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from ttlcache.estimators.regression import (
    Matrix,
    Row,
    accumulate,
    non_negative_solution,
)

#: Tokens whose computation takes as long as loading the weights: peak FLOP/s divided by
#: bytes/s, 156 on an A100, 295 on an H100. A step of fewer prompt tokens takes hardly
#: longer than one of none, and says nothing about many.
RIDGE_TOKENS = 256
#: No engine steps faster: results of two steps were fetched together.
MIN_STEP_S = 1e-3


class Step(NamedTuple):
    """One engine step, as it was scheduled.

    start_s: when that was; the steps before it may not be over then.
    decodes, decode_tokens: requests that go on with their output, their new tokens.
    prompts: (request id, tokens with KV before the step, and after it) of each request
        of whose prompt a part is computed.
    """

    start_s: float
    decodes: int = 0
    decode_tokens: int = 0
    prompts: Sequence[tuple[str, int, int]] = ()

    @property
    def prompt_tokens(self) -> int:
        return sum(after - before for _, before, after in self.prompts)

    @property
    def row(self) -> Row:
        """Prompt tokens, pairs, steps, decode tokens."""
        pairs = sum(float(n) * n - float(m) * m for _, m, n in self.prompts)
        # Several may have been scheduled as one.
        steps = self.decode_tokens / self.decodes if self.decodes else 1.0
        return float(self.prompt_tokens), pairs, steps, float(self.decode_tokens)


def _sum(one: Row, other: Row) -> Row:
    return tuple(map(operator.add, one, other))


def _is_measured(seconds: float) -> bool:
    return MIN_STEP_S <= seconds < math.inf


class StepFit:
    """Least squares of relative errors, with coefficients >= 0.

    Rows are divided by the seconds observed, or those expected where these are more: a
    stall's row is small then, and so is that of a step whose results were fetched with
    those of the one before. Lengths never seen are extrapolated along the shape of the
    seed, its b / a.

    Args:
        seed: a, b, c of P(n) = a n + b n^2 + c, used until a prompt was seen.
        step_tokens: most tokens of a step.
    """

    _FORGET = 0.995  # about the last 200 steps with prompts count
    _FORGET_DECODES = 0.999
    _SHAPE_WEIGHT, _SHAPE_TOKENS = 0.4, 16_000.0
    #: Steps of one size do not tell `base` from their tokens' time: it is little then.
    _BASE_RIDGE = 1.001
    _SOLVE_EVERY = 8  # once there are many, one more changes little
    _SAMPLED_FROM = 64  # prompts' steps; a quarter of later ones is learnt from

    def __init__(self, seed: Row, step_tokens: int) -> None:
        self.prefill = tuple(seed)
        self._seed = tuple(seed)
        self._step_tokens = step_tokens
        self._theta: Row = (seed[0], seed[1], 0.0, 0.0)
        self._gram: Matrix = [[0.0] * 4 for _ in range(4)]
        self._pull = [0.0] * 4
        # Of steps without prompts: sums of k k, k m, m m; k, m.
        self._decodes = [0.0] * 5
        self._count, self._sample = 0, 0.0
        # The step before, and its seconds: what decodes take is learnt from it when the
        # one after it is known.
        self._before: tuple[Row, float] = (0.0, 0.0, 0.0, 0.0), 0.0

    def observe(self, step: Step, seconds: float, *, is_ahead: bool = False) -> None:
        """A step, or several that were scheduled as one, took `seconds`.

        is_ahead: it was scheduled before the results of the one before were there. How
            the seconds of both are divided between them cannot be told then.
        """
        (row, seconds_before), self._before = self._before, (step.row, seconds)
        only_decodes = row[3] > 0.0 and not row[0]
        is_joined = bool(step.prompts) and is_ahead and only_decodes
        if only_decodes and not is_joined:
            self._observe_decodes(row, seconds_before)
        if not step.prompts:
            return
        if is_joined:
            row, seconds = _sum(row, step.row), seconds_before + seconds
        else:
            row = step.row
        if row[0] >= RIDGE_TOKENS and _is_measured(seconds) and self._is_sampled():
            self._learn(row, seconds, (row[0] / (row[0] + RIDGE_TOKENS)) ** 2)

    def _learn(self, x: Row, seconds: float, weight: float) -> None:
        expected_s = sum(a * b for a, b in zip(self._theta, x, strict=True))
        scale = max(seconds, expected_s)
        keep = 1.0 - (1.0 - self._FORGET) * weight
        row, y = [value / scale for value in x], weight * seconds / scale
        accumulate(self._gram, self._pull, row, y, keep, weight)
        self._count += 1
        if self._count <= 4 * self._SOLVE_EVERY or not self._count % self._SOLVE_EVERY:
            self._solve()

    def _observe_decodes(self, row: Row, seconds: float) -> None:
        if not _is_measured(seconds):
            return
        steps, tokens = row[2] / seconds, row[3] / seconds
        keep, sums = self._FORGET_DECODES, self._decodes
        sums[0] = keep * sums[0] + steps * steps
        sums[1] = keep * sums[1] + steps * tokens
        sums[2] = keep * sums[2] + tokens * tokens
        sums[3] = keep * sums[3] + steps
        sums[4] = keep * sums[4] + tokens

    def _is_sampled(self) -> bool:
        if self._count < self._SAMPLED_FROM:
            return True
        # Multiples of the golden ratio: no rhythm of the engine's steps hides any.
        self._sample = (self._sample + 0.618034) % 1.0
        return self._sample < 0.25

    def _solve(self) -> None:
        gram, pull = [list(line) for line in self._gram], list(self._pull)
        steps2, both, tokens2, steps, tokens = self._decodes
        gram[2][2] = self._BASE_RIDGE * (gram[2][2] + steps2)
        gram[3][3] = self._BASE_RIDGE * (gram[3][3] + tokens2)
        gram[2][3] += both
        gram[3][2] += both
        pull[2] += steps
        pull[3] += tokens
        self._hold_shape(gram)
        self._theta = a, b, base_s, _ = non_negative_solution(gram, pull)
        # The last step of a prompt is half full in the mean.
        self.prefill = (a + base_s / self._step_tokens, b, 0.5 * base_s)

    def _hold_shape(self, gram: Matrix) -> None:
        """b / a as in the seed: what the other ratio changes at one length is small."""
        n, (a, b, _) = self._SHAPE_TOKENS, self._seed
        scale = (self._theta[0] * n + self._theta[1] * n * n) * (a + b * n)
        if not scale > 0.0:
            return
        row = (-b * n * n / scale, a * n * n / scale)
        for i in range(2):
            for j in range(2):
                gram[i][j] += self._SHAPE_WEIGHT * row[i] * row[j]
