"""Profiles of step times from what a real server logged (`bench.serve.step_log`).

Least squares of relative errors over the steps of the log. Steps in a row are much
alike: what is held out for `held_out_error`, and what is drawn for standard errors, are
`_BLOCK` of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttlcache.estimators.regression import non_negative_solution
from ttlcache_sim.steps.profile import Profile
from ttlcache_sim.steps.steptime import sums

#: A residual beyond so many medians is clipped to that: the machine did something else.
_CLIP = 6.0
_FITS = 8
_BOOTSTRAPS = 40
_BLOCK = 50
#: On each side of a step, so many are like it.
_LIKE = 15
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """(request, new tokens, context after them) of one engine step or two; seconds."""

    scheduled: Sequence[tuple[str, int, int]]
    seconds: float
    steps: int = 1

    @property
    def row(self) -> tuple[float, ...]:
        """What its seconds are fitted to."""
        sizes = [(new, context) for _, new, context in self.scheduled]
        return (float(self.steps), *sums(sizes))

    @property
    def has_prompt(self) -> bool:
        return any(new > 1 for _, new, _ in self.scheduled)


def read_steps(path: Path) -> list[LoggedStep]:
    """Steps of a log in order, each from the end of the one before it.

    What lies between two steps is the engine's own work where a request goes on in
    both; else the engine may have been idle, and a step begins when it was scheduled.
    With asynchronous scheduling that is before the step before has ended; where it has
    a prompt and the other none, the two are one (`ttlcache.estimators.step_fit`).
    """
    steps: list[LoggedStep] = []
    last_s, last = -math.inf, set[str]()
    for line in path.read_text().splitlines():
        start_s, end_s, scheduled = json.loads(line)
        names = {name for name, _, _ in scheduled}
        is_ahead = start_s < last_s
        begin_s = last_s if is_ahead or last & names else start_s
        step = LoggedStep(scheduled, end_s - begin_s)
        if is_ahead and step.has_prompt and not steps[-1].has_prompt:
            before = steps.pop()
            both = (*before.scheduled, *scheduled)
            step = LoggedStep(both, before.seconds + step.seconds, 2)
        steps.append(step)
        last_s, last = end_s, names
    return steps


def fit(steps: Sequence[LoggedStep], machine: str = "") -> Profile:
    """
    Raises:
        ValueError: too few steps.
    """
    if len(steps) < 100:
        raise ValueError(f"{len(steps)} steps are too few for a profile")
    rows = np.array([step.row for step in steps])
    seconds = np.array([step.seconds for step in steps])
    block = np.arange(len(rows)) // _BLOCK
    fitted = block % 2 == 0
    expected = rows[~fitted] @ _fit(rows[fitted], seconds[fitted])
    errors = np.abs(expected - seconds[~fitted]) / seconds[~fitted]
    has_prompt = [step.has_prompt for step in steps]
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(_BOOTSTRAPS):
        blocks = rng.integers(0, block[-1] + 1, block[-1] + 1)
        chosen = np.concatenate([np.flatnonzero(block == each) for each in blocks])
        drawn.append(_fit(rows[chosen], seconds[chosen]))
    base_s, token_s, pair_s, kv_s = map(float, _fit(rows, seconds))
    return Profile(
        base_s,
        token_s,
        pair_s,
        kv_s,
        errors=tuple(map(float, np.std(drawn, axis=0))),
        held_out_error=_median(errors),
        held_out_prefill_error=_median(errors[np.array(has_prompt)[~fitted]]),
        like_step_error=_like_step_error(steps),
        largest_sums=tuple(map(float, rows.max(axis=0)[1:])),
        steps=len(steps),
        machine=machine,
    )


def _like_step_error(steps: Sequence[LoggedStep]) -> float:
    """Steps are alike that decode as many requests with about as much context."""
    by_size: dict[int, list[tuple[int, float]]] = {}
    for step in steps:
        if not step.has_prompt:
            context = sum(tokens for _, _, tokens in step.scheduled)
            by_size.setdefault(len(step.scheduled), []).append((context, step.seconds))
    errors = []
    for found in by_size.values():
        seconds = [each for _, each in sorted(found)]
        for at, own in enumerate(seconds):
            others = seconds[max(0, at - _LIKE) : at] + seconds[at + 1 : at + 1 + _LIKE]
            if len(others) >= _LIKE:
                errors.append(abs(float(np.median(others)) - own) / own)
    return _median(errors)


def _median(values: _Array | Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else 0.0


def fit_request_time(
    steps: Sequence[LoggedStep], turns: Sequence[tuple[int, float]]
) -> tuple[float, float]:
    """What a request takes outside the engine's steps: base, and per prompt token.

    Args:
        steps: of a server that served one request at a time.
        turns: prompt tokens of these requests, in order, and seconds from sending one
            to its last token.

    Raises:
        ValueError: the steps are of other requests.
    """
    in_steps_s: dict[str, float] = {}
    for step in steps:
        (name,) = {name for name, _, _ in step.scheduled}
        in_steps_s[name] = in_steps_s.get(name, 0.0) + step.seconds
    if len(in_steps_s) != len(turns):
        raise ValueError(f"steps of {len(in_steps_s)} requests, {len(turns)} turns")
    rows = np.array([(1.0, float(tokens)) for tokens, _ in turns])
    taken = zip(turns, in_steps_s.values(), strict=True)
    left_s = np.array([seconds - own_s for (_, seconds), own_s in taken])
    base_s, token_s = _fit(rows, np.maximum(left_s, 1e-4))
    return float(base_s), float(token_s)


def _fit(rows: _Array, seconds: _Array) -> _Array:
    """Coefficients >= 0 of least relative error, outliers clipped.

    Then scaled, so that all steps together take as long as they did, outliers clipped:
    the simulator adds them up.
    """
    y = expected = seconds
    for _ in range(_FITS):
        scaled = rows / expected[:, None]
        gram, pull = scaled.T @ scaled, scaled.T @ (y / expected)
        found = np.array(non_negative_solution(gram.tolist(), pull.tolist()))
        expected = rows @ found
        off = seconds - expected
        limit = _CLIP * np.median(np.abs(off) / expected) * expected
        y = expected + np.clip(off, -limit, limit)
    scaled_up: _Array = found * (y.sum() / expected.sum())
    return scaled_up
