"""The seconds that `explain` tells, against prefills measured on the same server.

The demo's programs run first and teach the connector what prefills cost. Then prompts
of several lengths, that nobody sent before, are timed one by one on the idle server.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from bench.command import option, write_json
from bench.compare.agents import CONNECTOR, AgentOptions
from bench.serve import tiny_model
from bench.serve.arms import warm_up
from bench.serve.replay import FIRST_TOKEN_ID, ReplayOptions, replay
from bench.serve.server import ServerOptions, VLLMServer
from bench.sim.load.programs import Program
from ttlcache.analysis.reader import load

#: How often each length is timed; the fastest counts, for others' load only slows.
REPEATS = 3
#: A price that is wrong by more is a fault.
MAX_ERROR = 0.25


@dataclass(frozen=True, slots=True)
class PricesOptions(AgentOptions):
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

    def should_be_s(self, tokens: float) -> float:
        """The measured seconds of a length, linear between those measured."""
        lengths = [0, *self.measured_s]
        return float(np.interp(tokens, lengths, [0.0, *self.measured_s.values()]))

    @property
    def ratios(self) -> list[float]:
        """Told by measured, of each claimed turn."""
        return [told_s / self.should_be_s(tokens) for tokens, told_s in self.claims]

    @property
    def ratio(self) -> float:
        """Of all together."""
        measured_s = sum(self.should_be_s(tokens) for tokens, _ in self.claims)
        return sum(told_s for _, told_s in self.claims) / measured_s


def prices(options: PricesOptions, console: Console) -> int:
    """What `ttlcache explain` says that claims saved, against measured prefills.

    Exits with 1 where the two differ by more than a quarter.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    recording = (options.out / "recording").absolute()
    extra = {**options.connector, "record_path": str(recording)}
    server = options.server({**CONNECTOR, "kv_connector_extra_config": extra})
    found = compare(
        tiny_model.build(options.model),
        options.workload(),
        server,
        sorted(n for n in options.lengths if n < server.max_model_len),
        recording,
        options.out / "server.log",
    )
    result = {
        "measured_s": found.measured_s,
        "claims": [list(claim) for claim in found.claims],
        "ratio": found.ratio,
    }
    write_json(options.out / "result.json", result)
    for tokens, seconds in found.measured_s.items():
        console.print(f"{tokens:>6} tokens prefilled alone: {seconds:.3f} s")
    low, middle, high = statistics.quantiles([*found.ratios, found.ratio], n=4)
    console.print(
        f"{len(found.claims)} claims: told / measured {found.ratio:.2f} in all, each "
        f"{middle:.2f} (quartiles {low:.2f}, {high:.2f})"
    )
    return int(abs(found.ratio - 1.0) > MAX_ERROR)


def compare(
    model: Path,
    programs: Sequence[Program],
    server: ServerOptions,
    lengths: Sequence[int],
    recording: Path,
    log_path: Path,
) -> Prices:
    """Replay `programs`, then time prompts of `lengths` tokens.

    Args:
        server: with TTLConnector, whose `record_path` is `recording`.

    Raises:
        ServerError: the server did not start.
        ValueError: no turn claimed a pin.
    """
    options = ReplayOptions()
    with VLLMServer(model, server, log_path, 180.0) as running:
        warm_up(running)
        replay(running.base_url, programs, options)
        measured_s = {n: _prefill_s(running, n) for n in lengths}
    turns = [
        turn
        for log in load(recording).programs
        for turn in log.turns
        if turn.claimed_pin is not None and turn.saved_s > 0.0
    ]
    if not turns:
        raise ValueError(f"{recording}: no turn claimed a pin")
    return Prices(measured_s, [(turn.cached_tokens, turn.saved_s) for turn in turns])


def _prefill_s(server: VLLMServer, tokens: int) -> float:
    rng, times = random.Random(tokens), []
    for _ in range(REPEATS):
        vocab = tiny_model.DEFAULT_SHAPE.vocab
        prompt = [rng.randrange(FIRST_TOKEN_ID, vocab) for _ in range(tokens)]
        began_s = time.perf_counter()
        server.ask(prompt, {"is_last_step": True})
        times.append(time.perf_counter() - began_s)
    return min(times)
