"""`ttlcache profile`: the paper's offline profile (CacheTTL v4 §5.2).

Prompts of 1000, 2000, 4000 … tokens are prefilled one at a time (`sweep`), and
P(n) = a n + b n^2 + c is fitted (`fit`). The budget is the whole command's: what vLLM's
start leaves of it is for measuring.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ttlcache.cli.common import fail
from ttlcache.clock import stopwatch_s
from ttlcache.estimators.costs import CostModel
from ttlcache_connector.cli.sweep import Curve, Measure, sweep

#: Seconds of measuring however long vLLM took to start.
MIN_MEASURING_S = 30.0


def profile(
    model: Annotated[str, typer.Argument(help="Folder or name of the model.")],
    out: Annotated[
        Path, typer.Option(help="File; a server reads it by `profile_path`.")
    ] = Path("profile.json"),
    max_tokens: Annotated[
        int, typer.Option(help="Longest prompt measured.", min=1000)
    ] = 32_000,
    budget_s: Annotated[
        float,
        typer.Option(
            "--budget",
            help="Seconds for all of it. Lengths that would take longer are skipped "
            "and named; at least 30 s are for measuring, whatever the start took.",
            min=5.0,
        ),
    ] = 150.0,
    engine: Annotated[
        str, typer.Option(help="JSON: more arguments of vllm.LLM.")
    ] = "{}",
) -> None:
    """Measure prefill at 1000, 2000, 4000 … tokens and fit the cost curve."""
    console = Console()
    began_s = stopwatch_s()
    try:
        arguments = json.loads(engine)
        if not isinstance(arguments, dict):
            raise ValueError("no JSON object")
    except ValueError as error:
        raise typer.BadParameter(f"--engine {engine!r}: {error}") from None
    _make_place(out)
    console.print("starting vLLM …")
    try:
        llm = _start(model, arguments)
    except Exception as error:  # noqa: BLE001 - vLLM raises anything
        if getattr(error, "name", None) == "vllm":
            fail(f"{error}: this command needs vLLM beside ttlcache")
        fail(
            f"vLLM did not start: {error}\nIts log above has the reason. --engine "
            "passes it other arguments; where memory is short, on a CPU too: "
            """--engine '{"gpu_memory_utilization": 0.4}'"""
        )
    longest = min(max_tokens, llm.llm_engine.model_config.max_model_len - 1)
    start_s = stopwatch_s() - began_s
    left_s = max(budget_s - start_s, min(budget_s, MIN_MEASURING_S))
    console.print(f"started in {start_s:.0f} s, {left_s:.0f} s for measuring")
    with console.status("warming up") as status:

        def tell(what: str, spent_s: float) -> None:
            status.update(f"{what}, {spent_s:.0f} s of {left_s:.0f}")

        curve = sweep(_prefill_of(llm), longest, left_s, stopwatch_s, tell)
    content = {"prefill": list(curve.coefficients)}
    CostModel(content)  # what the connector will make of it
    out.write_text(json.dumps(content) + "\n")
    _print(curve, console)
    spent_s = stopwatch_s() - began_s
    console.print(
        f'profile: {escape(str(out))}  (for "profile_path"), after {spent_s:.0f} s',
        soft_wrap=True,
    )


def _make_place(out: Path) -> None:
    """What cannot be written is said before minutes are spent on it."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {out}: {error}")
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        fail(f"--out {out} cannot be written")


def _start(model: str, arguments: dict[str, Any]) -> Any:
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


def _print(curve: Curve, console: Console) -> None:
    grid = Table(title="prefill", title_justify="left")
    for name in ("tokens", "fastest", "fitted", "error"):
        grid.add_column(name, justify="right")
    for point in curve.points:
        grid.add_row(
            f"{point.tokens:,}",
            f"{point.seconds:.4g} s",
            f"{point.predicted_s:.4g} s",
            f"{point.error:+.1%}",
        )
    console.print(grid)
    a, b, c = curve.coefficients
    console.print(f"P(n) = {a:.3g} n + {b:.3g} n^2 + {c:.3g} s", highlight=False)
    if curve.skipped:
        lengths = ", ".join(f"{tokens:,}" for tokens in curve.skipped)
        console.print(
            f"not measured, as time would not have sufficed: {lengths} tokens; "
            "a larger --budget reaches them",
            style="yellow",
            highlight=False,
        )
