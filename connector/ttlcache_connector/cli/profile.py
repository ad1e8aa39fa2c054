"""`ttlcache profile`: the paper's offline profile (CacheTTL v4 §5.2).

Prompts of 1000, 2000, 4000 … tokens are prefilled one at a time, each several times;
P(n) = a n + b n^2 + c is fitted with a, b, c >= 0 to the fastest of each length, with
relative errors weighing alike. Lengths between those measured check the fit.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ttlcache.clock import stopwatch_s
from ttlcache.costs import CostModel

FIRST_TOKENS = 1_000
REPEATS = 3
#: Lengths between the measured ones, as multiples of them: never fitted to.
CHECK_AT = 1.5
#: Seconds for one prompt of this many tokens -> seconds.
Measure = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Curve:
    """The fit and how well it predicts.

    fitted, unseen: (tokens, measured seconds, predicted seconds).
    """

    coefficients: tuple[float, float, float]
    fitted: list[tuple[int, float, float]]
    unseen: list[tuple[int, float, float]]

    @property
    def median_error(self) -> float:
        """Median relative error on lengths that were not fitted to."""
        errors = [abs(guess / real - 1.0) for _, real, guess in self.unseen]
        return statistics.median(errors) if errors else 0.0


def run(model: str, out: Path, max_tokens: int, budget_s: float, engine: str) -> None:
    """Start vLLM, measure, fit, write `out`."""
    console = Console()
    try:
        arguments = json.loads(engine)
        if not isinstance(arguments, dict):
            raise ValueError("no JSON object")
    except ValueError as error:
        raise typer.BadParameter(f"--engine {engine!r}: {error}") from None
    console.print("starting vLLM …")
    llm = _start(model, max_tokens, arguments)
    longest = min(max_tokens, llm.llm_engine.model_config.max_model_len - 1)
    curve = profile(
        _prefill_of(llm), longest, budget_s, stopwatch_s, _Bar(console, budget_s)
    )
    content: dict[str, Any] = {"prefill": list(curve.coefficients)}
    reload = _reload(llm.llm_engine.vllm_config)
    if reload is not None:
        content["reload"] = {"cpu": list(reload)}
    CostModel(content)  # what the connector will make of it
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content) + "\n")
    _print(curve, reload, console)
    console.print(f'profile: {escape(str(out))}  ("profile_path")', soft_wrap=True)


def profile(
    measure: Measure,
    longest: int,
    budget_s: float,
    now_s: Callable[[], float],
    told: Callable[[str, float], None] = lambda what, spent_s: None,
) -> Curve:
    """Measure within about `budget_s` seconds and fit.

    The lengths take turns, so that a burst of somebody else's load does not meet all
    measurements of one length. Prefill is at most quadratic, which bounds the next
    length's seconds: one that would not end in time is left out.
    """
    started_s = now_s()

    def left_s() -> float:
        return budget_s - (now_s() - started_s)

    measure(FIRST_TOKENS // 4)  # compiles, warms up
    best: dict[int, float] = {}
    for length in _lengths(longest):
        if best:
            before = max(best)
            bound_s = best[before] * (length / before) ** 2
            if left_s() < (REPEATS - 1) * sum(best.values()) + REPEATS * bound_s:
                break
        told(f"{length:,} tokens", now_s() - started_s)
        best[length] = measure(length)
    for _ in range(REPEATS - 1):
        for length, seconds in best.items():
            if left_s() > 2.0 * seconds:
                told(f"{length:,} tokens", now_s() - started_s)
                best[length] = min(seconds, measure(length))
    measured = {n for n in best if n not in _between(longest)}
    coefficients = fit([(n, best[n]) for n in sorted(measured)])
    costs = CostModel({"prefill": list(coefficients)})
    rows = [(n, s, costs.prefill_s(n)) for n, s in sorted(best.items())]
    return Curve(
        coefficients,
        [row for row in rows if row[0] in measured],
        [row for row in rows if row[0] not in measured],
    )


def _lengths(longest: int) -> list[int]:
    """1000, 1500, 2000, 3000, 4000 … tokens; `longest` alone if it is shorter."""
    doubled = [min(FIRST_TOKENS, longest)]
    while doubled[-1] * 2 <= longest:
        doubled.append(doubled[-1] * 2)
    return sorted({*doubled, *_between(longest)})


def _between(longest: int) -> set[int]:
    """Lengths that check the fit."""
    found, length = set(), FIRST_TOKENS
    while int(length * CHECK_AT) <= longest:
        found.add(int(length * CHECK_AT))
        length *= 2
    return found


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Non-negative least squares of relative errors: (a, b, c) of P(n).

    Exact: with three coefficients every support can be tried.
    """
    tokens = np.array([n for n, _ in points], dtype=np.float64)
    seconds = np.array([s for _, s in points], dtype=np.float64)
    rows = np.stack([tokens, tokens**2, np.ones_like(tokens)], axis=1)
    rows /= seconds[:, None]
    scale = np.abs(rows).max(axis=0)  # n^2 and 1 differ by orders of magnitude
    best, best_loss = np.zeros(3), float("inf")
    for size in (1, 2, 3):
        for support in map(list, combinations(range(3), size)):
            found, *_ = np.linalg.lstsq(
                rows[:, support] / scale[support], np.ones(len(points)), rcond=None
            )
            candidate = np.zeros(3)
            candidate[support] = found / scale[support]
            loss = float(((rows @ candidate - 1.0) ** 2).sum())
            # Of equally good ones the simplest: two points fit every pair of terms.
            if candidate.min() >= 0.0 and loss < best_loss - 1e-12:
                best, best_loss = candidate, loss
    a, b, c = (float(v) for v in best)
    return a, b, c


def _start(model: str, max_tokens: int, arguments: dict[str, Any]) -> Any:
    from vllm import LLM

    settings = {
        "model": model,
        "enable_prefix_caching": False,
        "max_num_seqs": 1,
        "disable_log_stats": True,
        "seed": 0,
        **arguments,
    }
    return LLM(**settings)


def _prefill_of(llm: Any) -> Measure:
    from vllm import SamplingParams

    one_token = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    rng = random.Random(0)

    def measure(tokens: int) -> float:
        ids = [rng.randrange(vocabulary) for _ in range(tokens)]
        began_s = stopwatch_s()
        llm.generate({"prompt_token_ids": ids}, one_token, use_tqdm=False)
        return stopwatch_s() - began_s

    return measure


def _reload(vllm_config: Any) -> tuple[float, float] | None:
    """(latency, seconds a token) from pinned host memory; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    layers = model.get_num_layers(parallel)
    heads, size = model.get_num_kv_heads(parallel), model.get_head_size()
    token_bytes = (
        2 * layers * heads * size * torch.tensor([], dtype=model.dtype).itemsize
    )
    small_s, big_s = _copy_s(1 << 16), _copy_s(1 << 28)
    return small_s, token_bytes * (big_s - small_s) / (1 << 28)


def _copy_s(size: int) -> float:
    """Fastest of some host-to-device copies of `size` bytes."""
    import torch

    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        began_s = stopwatch_s()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, stopwatch_s() - began_s)
    return best


class _Bar:
    """A progress bar over the budget."""

    def __init__(self, console: Console, budget_s: float) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("warming up", total=budget_s)

    def __call__(self, what: str, spent_s: float) -> None:
        self._progress.update(self._task, description=what, completed=spent_s)
        self._progress.refresh()


def _print(curve: Curve, reload: tuple[float, float] | None, console: Console) -> None:
    grid = Table(title="prefill", title_justify="left")
    for name in ("tokens", "measured", "predicted", "error", ""):
        grid.add_column(name, justify="right")
    rows = [(*row, "fitted") for row in curve.fitted]
    rows += [(*row, "unseen") for row in curve.unseen]
    for tokens, real, guess, kind in sorted(rows):
        error = f"{guess / real - 1:+.1%}"
        grid.add_row(f"{tokens:,}", f"{real:.4g} s", f"{guess:.4g} s", error, kind)
    console.print(grid)
    a, b, c = curve.coefficients
    console.print(f"P(n) = {a:.3g} n + {b:.3g} n^2 + {c:.3g} s", highlight=False)
    console.print(f"median error on unseen lengths: {curve.median_error:.1%}")
    if reload is not None:
        console.print(
            f"reload from host: {reload[0]:.3g} s + {reload[1]:.3g} s a token"
        )
