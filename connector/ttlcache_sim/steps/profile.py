"""Step times measured on a real server, as a file that the simulator reads.

    step = base + token_s * tokens + pair_s * pairs + kv_s * context

(sums as in `ttlcache_sim.steps.steptime`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ttlcache_sim.steps.steptime import StepTime

#: Bar on the median relative error of a step that was not fitted.
MAX_STEP_ERROR = 0.10


@dataclass(frozen=True, slots=True)
class Profile(StepTime):
    """A server's step times.

    step_base_s, token_s, pair_s, kv_s: see above. request_base_s, request_token_s:
        seconds of a request outside the engine's steps, and more for each prompt token.
    errors: standard errors of the four coefficients.
    held_out_error: median relative error of steps that were not fitted;
        held_out_prefill_error: of those among them that compute prompts.
    like_step_error: median relative difference of a decode step from the median of
        steps like it; no model of batch and context errs less.
    largest_sums: (tokens, pairs, context) of any step; beyond them it extrapolates.
    steps: how many were fitted. machine: name of its CPU or GPU.
    """

    step_base_s: float
    token_s: float
    pair_s: float
    kv_s: float
    request_base_s: float = 0.0
    request_token_s: float = 0.0
    errors: tuple[float, ...] = ()
    held_out_error: float = 0.0
    held_out_prefill_error: float = 0.0
    like_step_error: float = 0.0
    largest_sums: tuple[float, ...] = ()
    steps: int = 0
    machine: str = ""

    def of_sums(self, tokens: float, pairs: float, context: float) -> float:
        return (
            self.step_base_s
            + self.token_s * tokens
            + self.pair_s * pairs
            + self.kv_s * context
        )

    def request_s(self, prompt_tokens: int) -> float:
        return self.request_base_s + self.request_token_s * prompt_tokens

    @property
    def max_held_out_error(self) -> float:
        """What may be asked of it: `MAX_STEP_ERROR`, or a point over like steps."""
        return max(MAX_STEP_ERROR, self.like_step_error + 0.01)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Profile:
        """From what a file holds; TypeError: that is no profile."""
        values: dict[str, Any] = dict(found)
        for name in ("errors", "largest_sums"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def load_profile(path: Path) -> Profile:
    """
    Raises:
        ValueError: no such file, or no profile.
    """
    try:
        return Profile.of(json.loads(path.read_text()))
    except (OSError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"profile {path}: {error}; in a checkout, python -m bench profile makes one"
        ) from None
