"""`python -m bench fuzz`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from bench.command import Folders, write_json
from bench.compare.agents import CONNECTOR
from bench.serve import tiny_model
from bench.serve.server import SampleKey, ServerOptions, VLLMServer, total
from bench.stress.fuzz.play import Answer, describe, differences, play
from bench.stress.fuzz.requests import FuzzRequest, make
from bench.tables import Check, at_most, checks_table, equal
from ttlcache.cli.command import option

#: Differences that are printed; all are counted, and in the file.
MAX_PRINTED = 20
#: Requests after which metrics have their labels, but for a few rare values. Clients
#: send hundreds of names.
WARM_UP, _RARE_VALUES = 400, 8


@dataclass(frozen=True, slots=True)
class Played:
    """What one server did.

    label_values: how many ttlcache's metrics have, after the warm-up and at the end.
    samples: of /metrics at the end; none where the engine died.
    """

    answers: Mapping[int, Answer]
    is_alive: bool
    seconds: float
    label_values: tuple[int, int]
    samples: Mapping[SampleKey, float]

    def total(self, name: str) -> float:
        """Of one of ttlcache's metrics."""
        return total(self.samples, f"ttlcache_{name}")


@dataclass(frozen=True, slots=True)
class FuzzOptions(Folders):
    """How many requests, made from which seed."""

    requests: int = option(20_000, "Requests to each server.", min=WARM_UP)
    seed: int = option(0, "Seed of the requests.")
    out: Path = Path("out/fuzz")


def fuzz(options: FuzzOptions, console: Console) -> int:
    """The same odd requests to plain vLLM and to TTLConnector: who answers worse?

    Exit status 1: another status or other tokens where plain vLLM answers, an engine
    that ends, an exception in a hook, a label that a client made."""
    requests, seed = options.requests, options.seed
    rows, worse = compare(tiny_model.build(options.model), options.out, requests, seed)
    console.print(checks_table(f"{requests:,} requests, seed {seed}", rows))
    for line in worse[:MAX_PRINTED]:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return 0 if all(row.ok for row in rows) else 1


def compare(
    model: Path, out: Path, requests: int, seed: int
) -> tuple[list[Check], list[str]]:
    """Two servers, one after the other; writes fuzz.json.

    Returns:
        Rows of the table, and a line for each request that we answered worse.
    """
    out.mkdir(parents=True, exist_ok=True)
    plain = _run(
        model, None, out / "plain.log", requests, seed, attrgetter("plain_path")
    )
    ours = _run(
        model, CONNECTOR, out / "ttlcache.log", requests, seed, attrgetter("path")
    )
    worse = [
        describe(each, plain.answers.get(each.number), ours.answers[each.number])
        for each in differences(plain.answers, ours.answers, seed)
    ]
    rows = _rows(plain, ours, len(worse))
    result = {
        "rows": [asdict(row) for row in rows],
        "worse": worse,
        "statuses": _statuses(plain, ours, seed),
    }
    write_json(out / "fuzz.json", result)
    return rows, worse


def _run(
    model: Path,
    connector: Mapping[str, Any] | None,
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
        counts = (label_values, _label_values(server))
        return Played(answers, is_alive, seconds, counts, samples)


def _settle(server: VLLMServer) -> bool:
    """One plain turn, after which the engine has told its numbers; False: it died."""
    try:
        server.ask([5, 6, 7], max_tokens=2)
    except httpx.HTTPError:
        return False
    return True


def _label_values(server: VLLMServer) -> int:
    try:
        samples = server.metrics()
    except httpx.HTTPError:
        return -1
    # Buckets aside: a histogram shows them with its first value.
    ours = (labels for name, labels in samples if name.startswith("ttlcache_"))
    return len({item for labels in ours for item in labels if item[0] != "le"})


def _rows(plain: Played, ours: Played, worse: int) -> list[Check]:
    dropped = ours.total("http_values_dropped_total")
    unanswered = sum(not answer.status for answer in ours.answers.values())
    first, last = ours.label_values
    return [
        *(
            Check(
                f"{name} at the end",
                played.is_alive,
                f"{'alive' if played.is_alive else 'dead'}, {len(played.answers):,} "
                f"requests in {played.seconds:.0f} s",
                "alive",
            )
            for name, played in (("plain vLLM", plain), ("TTLConnector", ours))
        ),
        equal("without an answer", unanswered, 0),
        equal("status or tokens unlike plain vLLM's", worse, 0),
        equal("exceptions in hooks", ours.total("hook_errors_total"), 0),
        equal("exceptions in the middleware", ours.total("http_errors_total"), 0),
        equal("retention", ours.total("retention_enabled"), 1),
        at_most(
            "label values that came after the warm-up", last - first, _RARE_VALUES, ""
        ),
        Check("values dropped by the middleware", dropped > 0, f"{dropped:g}"),
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
