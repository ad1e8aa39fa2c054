"""One arm of a comparison: a server, a workload, and what was measured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from bench.serve.replay import Failure, ReplayOptions, ReplayResult, replay
from bench.serve.server import SampleKey, ServerOptions, VLLMServer, by_label, total
from bench.serve.tier_server import TierServer
from bench.serve.tiny_model import DEFAULT_SHAPE
from ttlcache_connector.lmcache_server.launch import TierOptions
from ttlcache_sim.load.programs import Program
from ttlcache_sim.metrics import Summary, TurnRecord, summarize

#: The first requests of a server compile kernels; these lengths warm them up.
_WARM_UP_PROMPT_TOKENS = (64, 3000)


@dataclass(frozen=True, slots=True)
class Arm:
    """A named server configuration."""

    name: str
    server: ServerOptions
    tiers: TierOptions | None = None
    """An LMCache server of the arm's own, started before vLLM; None: none."""


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What the server counted over the replay, warm-up excluded."""

    prefix_cache_queries: float
    """Prompt tokens looked up, again after a preemption."""
    prefix_cache_hits: float
    preemptions: float
    pins: Mapping[str, int]
    """Pins by outcome; empty without the connector."""
    claimed_tokens: float
    """Prompt tokens served from claimed pins."""
    prefill_tokens_saved: float
    """Of those, what plain vLLM would have evicted, as ttlcache counts it; with
    policy `observe` what pins would have spared."""
    prefill_seconds_saved: float
    """What these would have taken, at the price that it learnt."""
    hook_errors: float
    tier_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes copied between GPU and lower tier, by direction."""
    reloaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens that came back from a lower tier, by tier."""
    lower_tier_hits: float = 0.0
    """Prompt tokens that the lower tier held and GPU memory did not."""
    reload_s: float = 0.0
    """Seconds of the copies themselves."""
    failed_reloads: float = 0.0
    """Reloads that the lower tier promised and did not bring."""
    steps: float = 0.0
    """Forward passes."""
    step_tokens: float = 0.0
    """Tokens computed in them, prompt and output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A workload that one server served."""

    records: tuple[TurnRecord, ...]
    failures: tuple[Failure, ...]
    summary: Summary
    engine: EngineCounters
    replay_s: float
    wait_share: float = 0.0
    """Of the seconds that the server's busiest thread, the engine's, wanted a core,
    those that it waited for one: others ran. (Threads that wake for microseconds
    always wait.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult(Played):
    """Everything measured in one arm."""

    name: str
    command: tuple[str, ...]
    log_path: Path
    log_errors: tuple[str, ...]


def run_arm(
    arm: Arm,
    model: Path,
    programs: Sequence[Program],
    options: ReplayOptions,
    log_path: Path,
    on_turn: Callable[[TurnRecord], None] | None = None,
) -> ArmResult:
    """Start the arm's server, warm it up, replay, and stop it.

    Args:
        log_path: of vLLM; the LMCache server's log stands beside it.

    Raises:
        ServerError: the server did not start.
        ValueError: not one turn was completed.
    """
    with serving(arm, model, log_path) as server:
        played = play(server, programs, options, on_turn)
    return ArmResult(
        **{each.name: getattr(played, each.name) for each in fields(played)},
        name=arm.name,
        command=tuple(server.command),
        log_path=log_path,
        log_errors=tuple(server.errors_in_log()),
    )


@contextlib.contextmanager
def serving(arm: Arm, model: Path, log_path: Path) -> Iterator[VLLMServer]:
    """The arm's server, warmed up, above a server of its own if it needs one."""
    with contextlib.ExitStack() as stack:
        vllm = arm.server
        if arm.tiers is not None:
            tiers = TierServer(arm.tiers, log_path.with_suffix(".lmcache.log"))
            vllm = above(vllm, stack.enter_context(tiers).options)
        server = stack.enter_context(VLLMServer(model, vllm, log_path))
        warm_up(server)
        yield server


def play(
    server: VLLMServer,
    programs: Sequence[Program],
    options: ReplayOptions,
    on_turn: Callable[[TurnRecord], None] | None = None,
) -> Played:
    """Replay programs on a running server.

    Raises:
        ValueError: not one turn was completed.
    """
    before = server.metrics()
    began = server.thread_seconds()
    ready_s = time.monotonic()
    result = replay(server.base_url, programs, options, on_turn)
    replay_s = time.monotonic() - ready_s
    used = {
        name: (ran_s - began[name][0], waited_s - began[name][1])
        for name, (ran_s, waited_s) in server.thread_seconds().items()
        if name in began
    }
    ran_s, waited_s = max(used.values())
    return Played(
        records=result.records,
        failures=result.failures,
        summary=_summarize(result),
        engine=read_engine(server, before),
        replay_s=replay_s,
        wait_share=waited_s / (waited_s + ran_s),
    )


def above(server: ServerOptions, tiers: TierOptions) -> ServerOptions:
    """The server with the address of an LMCache server in its transfer config."""
    transfer = dict(server.kv_transfer_config or {})
    address = {
        key: value
        for key, value in tiers.connector_config().items()
        if key.startswith("lmcache.")
    }
    extra = {**transfer.get("kv_connector_extra_config", {}), **address}
    transfer["kv_connector_extra_config"] = extra
    return replace(server, kv_transfer_config=transfer)


def warm_up(server: VLLMServer) -> None:
    """Requests of several lengths, each a program that ends at once."""
    for length in _WARM_UP_PROMPT_TOKENS:
        _send_throwaway(server, length)


def _send_throwaway(server: VLLMServer, length: int) -> None:
    hint = {"program_id": f"warm-up-{length}", "is_last_step": True}
    prompt = [DEFAULT_SHAPE.vocab - 1] * length
    server.ask(prompt, hint, max_tokens=4, logprobs=0)


def read_engine(
    server: VLLMServer, before: Mapping[SampleKey, float]
) -> EngineCounters:
    """What a server counted since `before`."""
    after = server.metrics()
    # An idle engine does not step, so the connector's last events are reported
    # with the next request.
    _send_throwaway(server, _WARM_UP_PROMPT_TOKENS[0])
    flushed = server.metrics()

    def grown(name: str, samples: Mapping[SampleKey, float] = after) -> float:
        return total(samples, name) - total(before, name)

    def grown_by(name: str, label: str) -> dict[str, int]:
        start = by_label(before, name, label)
        end = by_label(flushed, name, label)
        return {k: round(v - start.get(k, 0.0)) for k, v in sorted(end.items())}

    return EngineCounters(
        prefix_cache_queries=grown("vllm:prefix_cache_queries_total"),
        prefix_cache_hits=grown("vllm:prefix_cache_hits_total"),
        preemptions=grown("vllm:num_preemptions_total"),
        pins=grown_by("ttlcache_pins_total", "outcome"),
        claimed_tokens=grown("ttlcache_claimed_tokens_total", flushed),
        prefill_tokens_saved=grown("ttlcache_prefill_tokens_saved_total", flushed)
        + grown("ttlcache_prefill_tokens_savable_total", flushed),
        prefill_seconds_saved=grown("ttlcache_prefill_seconds_saved_total", flushed),
        hook_errors=grown("ttlcache_hook_errors_total", flushed),
        tier_bytes=grown_by("ttlcache_tier_bytes_total", "direction"),
        reloaded_tokens=grown_by("ttlcache_reloaded_tokens_total", "tier"),
        lower_tier_hits=grown("vllm:external_prefix_cache_hits_total"),
        reload_s=grown("ttlcache_reload_seconds_sum", flushed),
        failed_reloads=grown("ttlcache_failed_reloads_total", flushed),
        steps=grown("vllm:iteration_tokens_total_count"),
        step_tokens=grown("vllm:iteration_tokens_total_sum"),
    )


def _summarize(result: ReplayResult) -> Summary:
    if not result.records and result.failures:
        raise ValueError(f"every program failed, e.g. {result.failures[0]}")
    return summarize(result.records)
