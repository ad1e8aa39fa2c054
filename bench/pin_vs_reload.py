"""Hold a context in GPU memory, reload it, or prefill it again: what each costs.

On a real engine above a real LMCache server. For every context length one program's
next turn is timed four ways: its pin claimed, its KV reloaded from CPU memory, from
disk, and prefilled. Holding is priced by its effect: the same background programs are
replayed with and without a context held for the whole replay, and the job seconds that
they lose are divided by the byte-seconds held.

The break-even gap of a recovery is the one whose holding costs others as many seconds
as the recovery costs the program itself.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import httpx
import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from rich.table import Table

from bench.metrics import jct_s
from bench.replay import ReplayOptions, replay
from bench.server import ServerError, VLLMServer, total
from bench.tier_server import TierServer
from bench.workloads import Program
from ttlcache import policies
from ttlcache.costs import CostModel
from ttlcache.gaps import GapHistory
from ttlcache.policies.base import View
from ttlcache.types import GapKey, Pressure, TurnFacts

#: Tokens that the next turn adds; they are prefilled in any case.
NEW_TOKENS = 32
#: Pins of the timed programs last this long unless they are claimed.
PIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """Medians of the next turn's seconds at one context length.

    claimed_s: with the KV in GPU memory, what no recovery can beat.
    *_gap_s: the break-even gaps, `math.inf` where holding costs nobody anything.
    """

    context_tokens: int
    kv_bytes: int
    claimed_s: float
    cpu_s: float
    disk_s: float
    prefill_s: float
    hold_cost: float = 0.0
    """Job seconds of others lost for each second that this context is held."""
    cpu_gap_s: float = 0.0
    disk_gap_s: float = 0.0
    prefill_gap_s: float = 0.0


class Client:
    """One program at a time, in token ids that nobody else uses."""

    def __init__(self, server: VLLMServer, tiers: TierServer, vocab: int) -> None:
        self._http = httpx.Client(base_url=server.base_url, timeout=600.0)
        self._server = server
        self._tiers = tiers
        self._vocab = vocab
        self._programs = 0

    def time_next_turn(self, tokens: int, lose: Callable[[], None]) -> float:
        """Seconds of a turn that extends `tokens`, after `lose` took place."""
        self._programs += 1
        name = f"timed-{self._programs}"
        context = self._tokens(tokens)
        self._ask(context, {"program_id": name, "tool": "timed"})
        lose()
        more = [*context, *self._tokens(NEW_TOKENS)]
        began = time.perf_counter()
        self._ask(more, {"program_id": name, "is_last_step": True})
        return time.perf_counter() - began

    def keep(self) -> None:
        """The pin is claimed in time."""

    def expire(self) -> None:
        """Out of GPU memory; the copy is below."""
        time.sleep(PIN_S)
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            self.poke()
            samples = self._server.metrics()
            waiting = total(samples, "ttlcache_demoting_blocks")
            if not waiting and not total(samples, "ttlcache_pins_active"):
                self.poke()
                self._http.post("/reset_prefix_cache").raise_for_status()
                return
        raise RuntimeError("the pin did not expire")

    def to_disk(self) -> None:
        """Out of CPU memory, too."""
        self.expire()
        if not self._tiers.clear_cpu():
            raise ServerError("the CPU tier does not become empty")

    def lose(self) -> None:
        """Out of everything."""
        self.to_disk()
        folder = self._tiers.options.disk
        assert folder is not None
        for file in folder.glob("*.data"):
            file.unlink()

    def hold(self, tokens: int) -> None:
        """Pin a context of the oldest program until `release`."""
        self._ask(self._tokens(tokens), {"program_id": "held", "ttl": "300s"})

    def release(self) -> None:
        self._ask([7], {"program_id": "held", "is_last_step": True})

    def poke(self) -> None:
        """An idle engine does not step."""
        self._ask([11, 12], {"is_last_step": True})

    def _ask(self, prompt: Sequence[int], hints: dict[str, object]) -> None:
        body = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {"ttlcache": hints},
        }
        self._http.post("/v1/completions", json=body).raise_for_status()

    def _tokens(self, number: int) -> list[int]:
        self._programs += 1
        seed = self._programs * 7919
        return [5 + (seed + i * i * 31 + i) % (self._vocab - 5) for i in range(number)]


def measure(
    client: Client, lengths: Sequence[int], repeats: int, bytes_per_token: int
) -> Iterator[Recovery]:
    """Time every way back at every length; lengths in ascending order."""
    for tokens in lengths:
        ways = (client.keep, client.expire, client.to_disk, client.lose)
        for way in ways:
            client.time_next_turn(tokens, way)  # compiles what this length needs
        claimed, cpu, disk, prefill = (
            statistics.median(
                client.time_next_turn(tokens, way) for _ in range(repeats)
            )
            for way in ways
        )
        yield Recovery(tokens, tokens * bytes_per_token, claimed, cpu, disk, prefill)


def hold_cost_per_byte(
    server: VLLMServer,
    client: Client,
    programs: Sequence[Program],
    tokens: int,
    kv_bytes: int,
    rounds: int,
) -> float:
    """Job seconds that others lose for each byte-second held; never negative.

    Median over `rounds` pairs of one replay with and one without the held context.
    """
    found = []
    for number in range(rounds):
        seconds = {}
        for held in (True, False) if number % 2 else (False, True):
            if held:
                client.hold(tokens)
            began = time.perf_counter()
            result = replay(server.base_url, programs, ReplayOptions(seed=number), None)
            lasted = time.perf_counter() - began
            if held:
                client.release()
            seconds[held] = (sum(jct_s(result.records).values()), lasted)
        lost = seconds[True][0] - seconds[False][0]
        found.append(lost / (kv_bytes * seconds[True][1]))
    return max(0.0, statistics.median(found))


def priced(recovery: Recovery, cost_per_byte: float) -> Recovery:
    """The recovery with the break-even gaps that a price of memory gives."""
    hold = cost_per_byte * recovery.kv_bytes

    def gap(seconds: float) -> float:
        extra = max(0.0, seconds - recovery.claimed_s)
        return extra / hold if hold > 0 else float("inf")

    return Recovery(
        **{
            **asdict(recovery),
            "hold_cost": hold,
            "cpu_gap_s": gap(recovery.cpu_s),
            "disk_gap_s": gap(recovery.disk_s),
            "prefill_gap_s": gap(recovery.prefill_s),
        }
    )


def policy_ttls(
    recoveries: Sequence[Recovery], gaps_s: Sequence[float], pressure: Pressure
) -> dict[str, list[tuple[float, float]]]:
    """Each policy's TTL at each length: without a lower tier, and with CPU memory."""
    costs = CostModel()
    for _ in range(50):
        for r in recoveries:
            costs.observe_prefill(r.context_tokens, 0, max(r.prefill_s, 1e-6))
            costs.observe_reload("cpu", r.context_tokens, max(r.cpu_s, 1e-6))
    key = GapKey("bash")
    history = GapHistory()
    for gap_s in gaps_s:
        history.observe(key, gap_s)
    costs.observe_footprint(max(1.0, pressure.pool_blocks / 8))
    found: dict[str, list[tuple[float, float]]] = {}
    for name in policies.SHIPPED:
        options = {"ttl_s": 2.0} if name == "fixed" else {}
        policy = policies.create(name, options)
        pairs = []
        for r in recoveries:
            facts = TurnFacts("p", 3, key, r.context_tokens, r.context_tokens // 32)
            answers = [
                policy.decide(
                    facts, View(history, costs, pressure=pressure, tier=tier)
                ).ttl_s
                for tier in (None, "cpu")
            ]
            pairs.append((answers[0], answers[1]))
        found[name] = pairs
    return found


def table(recoveries: Sequence[Recovery]) -> Table:
    """Seconds and break-even gaps by context length."""
    grid = Table(title="the next turn, seconds", title_justify="left")
    for name in ("context", "MB", "claimed", "CPU", "disk", "prefill", "hold cost"):
        grid.add_column(name, justify="right")
    for name in ("gap CPU", "gap disk", "gap prefill"):
        grid.add_column(name, justify="right")
    for r in recoveries:
        seconds = (r.claimed_s, r.cpu_s, r.disk_s, r.prefill_s, r.hold_cost)
        grid.add_row(
            f"{r.context_tokens:,}",
            f"{r.kv_bytes / 1e6:.1f}",
            *(f"{s:.3f}" for s in seconds),
            *(f"{g:.2f}" for g in (r.cpu_gap_s, r.disk_gap_s, r.prefill_gap_s)),
        )
    return grid


def ttl_table(
    recoveries: Sequence[Recovery], ttls: dict[str, list[tuple[float, float]]]
) -> Table:
    """What the policies would do: TTL without and with a CPU tier below."""
    grid = Table(title="TTL, seconds: no tier / CPU tier", title_justify="left")
    grid.add_column("policy")
    for r in recoveries:
        grid.add_column(f"{r.context_tokens:,}", justify="right")
    for name, pairs in ttls.items():
        grid.add_row(name, *(f"{a:.2f} / {b:.2f}" for a, b in pairs))
    return grid


def write_csv(recoveries: Sequence[Recovery], path: Path) -> None:
    """One row a context length."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Recovery)])
        writer.writerows([list(asdict(r).values()) for r in recoveries])


def plot(recoveries: Sequence[Recovery], path: Path) -> Path:
    """Seconds and break-even gaps over the context length."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    tokens = [r.context_tokens for r in recoveries]
    for name, style in (
        ("claimed", "o-"),
        ("cpu", "s-"),
        ("disk", "^-"),
        ("prefill", "d-"),
    ):
        left.plot(
            tokens, [getattr(r, f"{name}_s") for r in recoveries], style, label=name
        )
        if name != "claimed":
            gaps = [getattr(r, f"{name}_gap_s") for r in recoveries]
            right.plot(tokens, gaps, style, label=name)
    left.set(xlabel="context, tokens", ylabel="next turn, s", xscale="log")
    right.set(xlabel="context, tokens", ylabel="break-even gap, s", xscale="log")
    for axes in (left, right):
        axes.set_yscale("log")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
