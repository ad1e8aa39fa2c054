"""`python -m bench fuzz`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from bench.serve import tiny_model
from bench.serve.server import ServerOptions, VLLMServer, total
from bench.stress.fuzz.play import (
    Answer,
    describe,
    differences,
    our_path,
    plain_path,
    play,
)
from bench.stress.fuzz.requests import FuzzRequest, make

#: Differences that are printed; all are counted, and in the file.
MAX_PRINTED = 20
#: Requests after which every metric has its labels.
WARM_UP = 400
CONNECTOR = {"kv_connector": "TTLConnector", "kv_role": "kv_both"}


@dataclass(frozen=True, slots=True)
class Played:
    """What one server did.

    label_values: how many ttlcache's metrics have, after the warm-up and at the end.
    """

    answers: Mapping[int, Answer]
    is_alive: bool
    seconds: float
    label_values: tuple[int, int]
    hook_errors: float
    http_errors: float
    dropped: float
    retention_enabled: float


def fuzz(
    requests: Annotated[
        int, typer.Option(help="Requests to each server.", min=WARM_UP)
    ] = 20_000,
    seed: Annotated[int, typer.Option(help="Seed of the requests.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "out/fuzz"
    ),
    model: Annotated[Path, typer.Option(help="Folder of the tiny model.")] = Path(
        "out/models/tiny"
    ),
) -> None:
    """The same odd requests to plain vLLM and to TTLConnector: who answers worse?

    Exit status 1: another status or other tokens where plain vLLM answers, an engine
    that ends, an exception in a hook, a label that a client made."""
    console = Console()
    rows, worse = compare(tiny_model.build(model), out, requests, seed)
    table = Table(title=f"{requests:,} requests, seed {seed}", title_justify="left")
    for name in ("", "", "found", "allowed"):
        table.add_column(name)
    for ok, name, value, allowed in rows:
        mark = "[green]ok[/]" if ok else "[red]FAILED[/]"
        table.add_row(mark, name, value, allowed)
    console.print(table)
    for line in worse[:MAX_PRINTED]:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    raise typer.Exit(0 if all(row[0] for row in rows) else 1)


Row = tuple[bool, str, str, str]


def compare(
    model: Path, out: Path, requests: int, seed: int
) -> tuple[list[Row], list[str]]:
    """Two servers, one after the other; writes fuzz.json.

    Returns:
        Rows of the table, and a line for each request that we answered worse.
    """
    out.mkdir(parents=True, exist_ok=True)
    plain = _run(model, None, out / "plain.log", requests, seed, plain_path)
    ours = _run(model, CONNECTOR, out / "ttlcache.log", requests, seed, our_path)
    worse = [
        describe(each, plain.answers.get(each.number), ours.answers[each.number])
        for each in differences(plain.answers, ours.answers, seed)
    ]
    rows = _rows(plain, ours, len(worse))
    result = {"rows": rows, "worse": worse, "statuses": _statuses(plain, ours, seed)}
    (out / "fuzz.json").write_text(json.dumps(result, indent=1) + "\n")
    return rows, worse


def _run(
    model: Path,
    connector: dict[str, str] | None,
    log: Path,
    requests: int,
    seed: int,
    path_of: Callable[[FuzzRequest], str | None],
) -> Played:
    options = ServerOptions(
        num_blocks=320,
        max_model_len=4096,
        kv_transfer_config=connector,
        extra_env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    with VLLMServer(model, options, log) as server:
        started_s = time.monotonic()
        answers = play(server.base_url, range(WARM_UP), path_of, seed)
        _settle(server)
        label_values = _label_values(server)
        answers |= play(server.base_url, range(WARM_UP, requests), path_of, seed)
        seconds = time.monotonic() - started_s
        is_alive = _settle(server)
        samples = server.metrics() if is_alive else {}
        return Played(
            answers,
            is_alive,
            seconds,
            (label_values, _label_values(server)),
            total(samples, "ttlcache_hook_errors_total"),
            total(samples, "ttlcache_http_errors_total"),
            total(samples, "ttlcache_http_values_dropped_total"),
            total(samples, "ttlcache_retention_enabled"),
        )


def _settle(server: VLLMServer) -> bool:
    """One plain turn, after which the engine has told its numbers; False: it died."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}
    try:
        answer = httpx.post(
            f"{server.base_url}/v1/completions", json=body, timeout=300.0
        )
    except httpx.HTTPError:
        return False
    return answer.status_code == 200


def _label_values(server: VLLMServer) -> int:
    try:
        samples = server.metrics()
    except httpx.HTTPError:
        return -1
    # Buckets aside: a histogram shows them with its first value.
    ours = (labels for name, labels in samples if name.startswith("ttlcache_"))
    return len({item for labels in ours for item in labels if item[0] != "le"})


def _rows(plain: Played, ours: Played, worse: int) -> list[Row]:
    unanswered = sum(not answer.status for answer in ours.answers.values())
    errors = f"{ours.hook_errors:g} in hooks, {ours.http_errors:g} in the middleware"
    return [
        (
            plain.is_alive,
            "plain vLLM at the end",
            f"{'alive' if plain.is_alive else 'dead'}, {len(plain.answers):,} requests "
            f"in {plain.seconds:.0f} s",
            "alive",
        ),
        (
            ours.is_alive,
            "TTLConnector at the end",
            f"{'alive' if ours.is_alive else 'dead'}, {len(ours.answers):,} requests "
            f"in {ours.seconds:.0f} s",
            "alive",
        ),
        (unanswered == 0, "without an answer", f"{unanswered}", "0"),
        (worse == 0, "status or tokens unlike plain vLLM's", f"{worse}", "0"),
        (ours.hook_errors == ours.http_errors == 0, "exceptions of ours", errors, "0"),
        (ours.retention_enabled == 1, "retention", f"{ours.retention_enabled:g}", "1"),
        (
            ours.label_values[0] == ours.label_values[1],
            "label values of ttlcache's metrics",
            f"{ours.label_values[0]} … {ours.label_values[1]}",
            "constant",
        ),
        (ours.dropped > 0, "values dropped by the middleware", f"{ours.dropped:g}", ""),
    ]


def _statuses(plain: Played, ours: Played, seed: int) -> dict[str, Any]:
    """How often each pair of statuses was seen, by path."""
    pairs: Counter[str] = Counter()
    for number, answer in ours.answers.items():
        theirs = plain.answers.get(number)
        request = make(number, seed)
        path = request.plain_path or "/".join(request.path.split("/")[:2])
        status = "-" if theirs is None else theirs.status
        pairs[f"{path} {status} {answer.status}"] += 1
    return dict(sorted(pairs.items()))
