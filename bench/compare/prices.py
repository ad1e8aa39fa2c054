"""The seconds that `explain` tells, against prefills measured on the same server.

The demo's programs run first and teach the connector what prefills cost. Then prompts
of several lengths, that nobody sent before, are timed one by one on the idle server.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from bench.serve.arms import warm_up
from bench.serve.replay import FIRST_TOKEN_ID, ReplayOptions, replay
from bench.serve.server import ServerOptions, VLLMServer
from bench.sim.workloads import Program
from ttlcache.analysis.load import load

#: How often each length is timed; the fastest counts, for others' load only slows.
REPEATS = 3


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
        warm_up(running.base_url, options)
        replay(running.base_url, programs, options)
        measured_s = {n: _prefill_s(running.base_url, options, n) for n in lengths}
    turns = [
        turn
        for log in load(recording).programs
        for turn in log.turns
        if turn.claimed_pin is not None and turn.saved_s > 0.0
    ]
    if not turns:
        raise ValueError(f"{recording}: no turn claimed a pin")
    return Prices(measured_s, [(turn.cached_tokens, turn.saved_s) for turn in turns])


def _prefill_s(base_url: str, options: ReplayOptions, tokens: int) -> float:
    rng, times = random.Random(tokens), []
    for _ in range(REPEATS):
        body = {
            "model": options.model,
            "prompt": [
                rng.randrange(FIRST_TOKEN_ID, options.vocab_size) for _ in range(tokens)
            ],
            "max_tokens": 1,
            "kv_transfer_params": {"ttlcache": {"is_last_step": True}},
        }
        began_s = time.perf_counter()
        answer = httpx.post(f"{base_url}/v1/completions", json=body, timeout=300.0)
        answer.raise_for_status()
        times.append(time.perf_counter() - began_s)
    return min(times)
