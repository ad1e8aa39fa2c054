"""`python -m bench prices`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from bench.compare.demo import CONNECTOR, DemoOptions
from bench.serve.process import ServerError

#: A price that is wrong by more is a fault.
MAX_ERROR = 0.25
_DEFAULTS = DemoOptions()


def prices(
    programs: Annotated[int, typer.Option(help="How many agents.", min=1)] = (
        _DEFAULTS.programs
    ),
    rate: Annotated[float, typer.Option(help="Agent arrivals per second.")] = (
        _DEFAULTS.rate
    ),
    blocks: Annotated[int, typer.Option(help="KV pool, in blocks.", min=16)] = (
        _DEFAULTS.blocks
    ),
    token_scale: Annotated[
        float, typer.Option(help="Factor on the paper's token counts.")
    ] = _DEFAULTS.token_scale,
    lengths: Annotated[
        str, typer.Option(help="Prompts that are timed, tokens with commas between.")
    ] = "500,1000,2000,4000,8000",
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "out/prices"
    ),
    model: Annotated[Path, typer.Option(help="Folder of the tiny model.")] = (
        _DEFAULTS.model
    ),
) -> None:
    """What `ttlcache explain` says that claims saved, against measured prefills.

    Exits with 1 where the two differ by more than a quarter.
    """
    # Here: the server and its client are needed by this command only.
    from bench.compare import prices as bench
    from bench.serve import tiny_model

    console = Console()
    options = DemoOptions(programs, rate, blocks, token_scale, out=out, model=model)
    out.mkdir(parents=True, exist_ok=True)
    recording = (out / "recording").absolute()
    extra = {"record_path": str(recording)}
    try:
        server = options.server({**CONNECTOR, "kv_connector_extra_config": extra})
        timed = [int(part) for part in lengths.split(",")]
        found = bench.compare(
            tiny_model.build(model),
            options.workload(),
            server,
            sorted(n for n in timed if n < server.max_model_len),
            recording,
            out / "server.log",
        )
    except (ServerError, ValueError) as error:
        console.print(
            f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False
        )
        raise typer.Exit(1) from None
    result = {
        "measured_s": found.measured_s,
        "claims": [list(claim) for claim in found.claims],
        "ratio": found.ratio,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    for tokens, seconds in found.measured_s.items():
        console.print(f"{tokens:>6} tokens prefilled alone: {seconds:.3f} s")
    low, middle, high = statistics.quantiles([*found.ratios, found.ratio], n=4)
    console.print(
        f"{len(found.claims)} claims: told / measured {found.ratio:.2f} in all, each "
        f"{middle:.2f} (quartiles {low:.2f}, {high:.2f})"
    )
    raise typer.Exit(int(abs(found.ratio - 1.0) > MAX_ERROR))
