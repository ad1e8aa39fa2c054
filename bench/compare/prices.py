"""The seconds that `explain` tells, against prefills measured on the same server.

The demo's programs run first and teach the connector what prefills cost. Then prompts
of several lengths, that nobody sent before, are timed one by one on the idle server.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from bench.command import write_json
from bench.compare.agents import CONNECTOR, ComparisonOptions
from bench.serve import tiny_model
from bench.serve.arms import warm_up
from bench.serve.replay import FIRST_TOKEN_ID, ReplayOptions, replay
from bench.serve.server import VLLMServer
from ttlcache.analysis.reader import load
from ttlcache.cli.command import option

#: How often each length is timed; the fastest counts, for others' load only slows.
REPEATS = 3
#: A price that is wrong by more is a fault.
MAX_ERROR = 0.25


@dataclass(frozen=True, slots=True)
class PricesOptions(ComparisonOptions):
    """The demo's agents, and the prompts timed after them."""

    lengths: tuple[int, ...] = option(
        (500, 1000, 2000, 4000, 8000),
        "Prompts that are timed, tokens with commas between.",
    )
    out: Path = Path("out/prices")


@dataclass(frozen=True, slots=True)
class Prices:
    """What turns saved by claiming a pin, as told and as measured.

    measured_s: tokens of a prompt -> seconds, from the request to its first token.
    claims: (prefill tokens spared, seconds told) of each claimed turn.
    """

    measured_s: Mapping[int, float]
    claims: Sequence[tuple[int, float]]

    @property
    def should_be_s(self) -> list[float]:
        """Of each claim: measured seconds, linear between the lengths measured."""
        lengths = [0, *self.measured_s]
        seconds = [0.0, *self.measured_s.values()]
        return [float(np.interp(n, lengths, seconds)) for n, _ in self.claims]

    @property
    def ratios(self) -> list[float]:
        """Told by measured, of each claimed turn."""
        pairs = zip(self.claims, self.should_be_s, strict=True)
        return [told_s / measured_s for (_, told_s), measured_s in pairs]

    @property
    def ratio(self) -> float:
        """Of all together."""
        return sum(told_s for _, told_s in self.claims) / sum(self.should_be_s)


def prices(options: PricesOptions, console: Console) -> int:
    """What `ttlcache explain` says that claims saved, against measured prefills.

    Exits with 1 where the two differ by more than a quarter.
    """
    programs, recording = options.workload(), (options.out / "recording").absolute()
    extra = {**options.connector, "record_path": str(recording)}
    server = options.server({**CONNECTOR, "kv_connector_extra_config": extra})
    model, log_path = tiny_model.build(options.model), options.out / "server.log"
    lengths = sorted(n for n in options.lengths if n < server.max_model_len)
    with VLLMServer(model, server, log_path) as running:
        warm_up(running)
        replay(running.base_url, programs, ReplayOptions())
        measured_s = {n: _prefill_s(running, n) for n in lengths}
    claims = [
        (turn.cached_tokens, turn.saved_s)
        for log in load(recording).programs
        for turn in log.turns
        if turn.claimed_pin is not None and turn.saved_s > 0.0
    ]
    if not claims:
        raise ValueError(f"{recording}: no turn claimed a pin")
    found = Prices(measured_s, claims)
    write_json(options.out / "result.json", {**asdict(found), "ratio": found.ratio})
    for tokens, seconds in measured_s.items():
        console.print(f"{tokens:>6} tokens prefilled alone: {seconds:.3f} s")
    low, middle, high = np.quantile(found.ratios, (0.25, 0.5, 0.75))
    console.print(
        f"{len(claims)} claims: told / measured {found.ratio:.2f} in all, each "
        f"{middle:.2f} (quartiles {low:.2f}, {high:.2f})"
    )
    return int(abs(found.ratio - 1.0) > MAX_ERROR)


def _prefill_s(server: VLLMServer, tokens: int) -> float:
    rng, times = random.Random(tokens), []
    for _ in range(REPEATS):
        vocab = tiny_model.DEFAULT_SHAPE.vocab
        prompt = [rng.randrange(FIRST_TOKEN_ID, vocab) for _ in range(tokens)]
        began_s = time.perf_counter()
        server.ask(prompt, {"is_last_step": True})
        times.append(time.perf_counter() - began_s)
    return min(times)
