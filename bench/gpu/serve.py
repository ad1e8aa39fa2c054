"""Stages with vLLM's server: equal tokens, and the demo's agents at several loads."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.compare.agents import arm_of
from bench.gpu.device import free_gpu_bytes, link_gb_per_s
from bench.gpu.stage import Json, Stage, Verdict, read
from bench.serve import tiny_model
from bench.serve.arms import play, serving
from bench.serve.server import VLLMServer
from bench.tables import Check, at_most, equal
from ttlcache_sim.load.programs import Program, Turn
from ttlcache_sim.metrics import TurnRecord, percentile
from ttlcache_sim.steps.profile import Profile

if TYPE_CHECKING:
    from bench.gpu.sizes import Beside, ServedAgents

#: Decode TPOT p99 beside copies, by the same without them.
MAX_TPOT_RATIO = 1.03
#: At a low load all arms are equal, up to this share.
NOISE = 0.02
#: Of a reload beside decode, of one pinned copy.
MIN_LINK_SHARE = 0.85
#: A learnt price is of the right size within this.
MAX_PRICE_RATIO = 1.5
_BESIDE = "decode beside reloads"
_STREAM, _CONTEXT = "stream", "context"

#: Programs to replay, and what is read off their turns besides.
Workload = tuple[Sequence[Program], Callable[[Sequence[TurnRecord]], Json]]


def tokens(stage: Stage) -> Verdict:
    """Greedy tokens of seeded weights: equal in every arm."""
    agents = stage.sizes.tokens
    workload = (agents.workload(), _outputs)
    play_arms(stage, agents, {"tokens": dict.fromkeys(agents.arms, workload)})
    base, *others = (stage.cells[f"{arm}, tokens"] for arm in agents.arms)
    checks = _sound(stage)
    for arm, found in zip(agents.arms[1:], others, strict=True):
        differing = {
            turn
            for turn in base["outputs"].keys() | found["outputs"].keys()
            if base["outputs"].get(turn) != found["outputs"].get(turn)
        }
        checks.append(equal(f"{arm}: turns with other tokens", len(differing), 0))
        moved = found["tier_bytes"].get("promoted", 0) if "+" in arm else 1
        claimed = found["pins"].get("claimed", 0)
        checks.append(_at_least(f"{arm}: pins claimed", claimed, 1))
        checks.append(_at_least(f"{arm}: bytes reloaded", moved, 1))
    return Verdict(checks)


def serve(stage: Stage) -> Verdict:
    """Mean JCT and hit share at each load, by arm, and decodes beside copies."""
    sizes, agents = stage.sizes, stage.sizes.serve
    link = stage.cell("link", partial(link_gb_per_s, sizes.pinned_bytes))
    loads = {
        f"{rate:g}/s": replace(agents, rate=rate, seed=number).workload()
        for number, rate in enumerate(agents.loads)
    }

    contexts = {"pins": 1, "pins+cpu": sizes.beside.contexts}
    workloads: dict[str, Mapping[str, Workload]] = {
        _BESIDE: {
            arm: (beside(sizes.beside, count), _decodes)
            for arm, count in contexts.items()
        }
    }
    for load, programs in loads.items():
        workloads[load] = {arm: (programs, lambda _: {}) for arm in agents.arms}
    play_arms(stage, agents, workloads)
    cells, bars = stage.cells, []
    rivals = [arm for arm in agents.arms if not arm.startswith("pins")]
    for load, base in itertools.product(loads, rivals):
        plain, ours = cells[f"{base}, {load}"], cells[f"pins+cpu, {load}"]
        for what, least in (("mean_jct_s", False), ("prompt_hit", True)):
            compare = _at_least if least else partial(at_most, unit="")
            name = f"{what} of pins+cpu at {load}, against {base}"
            limit = plain[what] * (1 - NOISE if least else 1 + NOISE)
            bars.append(compare(name, ours[what], limit))
    alone, copying = (cells[f"{arm}, {_BESIDE}"] for arm in ("pins", "pins+cpu"))
    ratio = copying["tpot_p99_s"] / alone["tpot_p99_s"]
    bars.append(at_most("decode TPOT p99 beside copies", ratio, MAX_TPOT_RATIO, "x"))
    reloaded = copying["tier_bytes"].get("promoted", 0)
    speed = reloaded / max(copying["reload_s"], 1e-9) / 1e9
    share = speed / link["load"]
    bars.append(_at_least("reload beside decode, of the link", share, MIN_LINK_SHARE))
    ours = [cells[f"{arm}, {load}"] for load in loads for arm in contexts]
    bars.append(_price(stage, ours))
    checks = [*_sound(stage), _at_least("bytes reloaded beside decode", reloaded, 1)]
    return Verdict(checks, bars)


def _price(stage: Stage, cells: Sequence[Json]) -> Check:
    """What a saved prompt token would have cost, as ttlcache learnt it, by `steps`."""
    name = "learnt seconds of a prompt token, by the profile's"
    saved = sum(cell["prefill_tokens_saved"] for cell in cells)
    measured = read(stage.folder, "steps").get("cells", {}).get("profile")
    if not saved or measured is None:
        return Check(name, None, "no tokens saved" if measured else "no profile")
    profile, length = Profile.of(measured), stage.sizes.beside.context_tokens
    seconds = sum(cell["prefill_seconds_saved"] for cell in cells)
    ratio = seconds / saved / (profile.prefill_s(length, length) / length)
    is_near = 1 / MAX_PRICE_RATIO <= ratio <= MAX_PRICE_RATIO
    return Check(name, is_near, f"{ratio:.2f}", f"within {MAX_PRICE_RATIO:g}x")


def play_arms(
    stage: Stage,
    agents: ServedAgents,
    workloads: Mapping[str, Mapping[str, Workload]],
) -> None:
    """Every arm of every workload as the cell "arm, workload".

    As many servers as fit start and stop together, and are idle while another one is
    measured.
    One that does not start, or fails, leaves the others' cells whole.

    Args:
        workloads: of each name, by arm.

    Raises:
        Exception: the first one's that failed, at the end.
    """
    model = tiny_model.build(stage.folder / f"model-{stage.name}", shape=agents.shape)
    missing = {
        f"{arm}, {kind}": (arm, workload)
        for kind, arms in workloads.items()
        for arm, workload in arms.items()
        if f"{arm}, {kind}" not in stage.cells
    }
    wanted = {arm for arm, _ in missing.values()}
    names = [name for name in agents.arms if name in wanted]
    size = len(names) or 1
    if agents.server_bytes:
        size = max(1, free_gpu_bytes() // agents.server_bytes)
    errors: list[BaseException | None] = []
    for first in range(0, len(names), size):
        stacks = {name: contextlib.ExitStack() for name in names[first : first + size]}
        try:
            with ThreadPoolExecutor() as pool:  # ends when all have started or failed
                starts = {
                    name: pool.submit(_start, stage, agents, model, name, stack)
                    for name, stack in stacks.items()
                }
            errors += [each.exception() for each in starts.values()]
            for cell, (name, workload) in missing.items():
                if name not in starts or starts[name].exception():
                    continue
                played = partial(_played, starts[name].result(), agents, workload)
                try:
                    stage.cell(cell, played)
                except Exception as error:  # noqa: BLE001 - other servers still run
                    errors.append(error)
        finally:
            with ThreadPoolExecutor() as pool:
                stops = [pool.submit(stack.close) for stack in stacks.values()]
            errors += [each.exception() for each in stops]
    for failed in filter(None, errors):
        raise failed


def _start(
    stage: Stage,
    agents: ServedAgents,
    model: Path,
    name: str,
    stack: contextlib.ExitStack,
) -> VLLMServer:
    """The server of an arm; `stack` stops it."""
    arm = arm_of(name, agents.transfer(name), agents)
    log_path = stage.folder / f"{stage.name}-{name}.log"
    return stack.enter_context(serving(arm, model, log_path))


def beside(sizes: Beside, contexts: int) -> tuple[Program, ...]:
    """Streams, and turns of so many contexts that come back one after the other."""
    stream = Turn(16, sizes.stream_output_tokens, "bash", 0.0)
    streams = (
        Program(f"{_STREAM}-{i}", 0.0, (stream,) * sizes.stream_turns)
        for i in range(sizes.streams)
    )
    turns = tuple(
        Turn(32 if i else sizes.context_tokens, 8, "bash", sizes.gap_s * contexts)
        for i in range(1 + sizes.turns * sizes.contexts // contexts)
    )
    returning = (
        Program(f"{_CONTEXT}-{i}", i * sizes.gap_s, turns) for i in range(contexts)
    )
    return (*streams, *returning)


def _played(server: VLLMServer, agents: ServedAgents, workload: Workload) -> Json:
    programs, read = workload
    played = play(server, programs, agents.replay())
    return {
        **asdict(played.summary),
        **asdict(played.engine),
        "tpot_p99_s": _tpot_p99_s(played.records),
        "replay_s": played.replay_s,
        "failures": [asdict(failure) for failure in played.failures],
        "log_errors": server.errors_in_log(),
    } | read(played.records)


def _outputs(records: Sequence[TurnRecord]) -> Json:
    """A digest of every turn's output tokens."""
    digests = {
        f"{r.program_id}/{r.turn}": hashlib.sha256(
            repr(r.output_token_ids).encode()
        ).hexdigest()[:16]
        for r in records
    }
    return {"outputs": digests}


def _decodes(records: Sequence[TurnRecord]) -> Json:
    """Of streams' turns between the contexts' first turns and the last turn of any."""
    firsts = (r for r in records if r.program_id.startswith(_CONTEXT) and not r.turn)
    begun_s = max(r.departure_s for r in firsts)
    ended_s = max(r.departure_s for r in records if r.program_id.startswith(_CONTEXT))
    streams = [
        r
        for r in records
        if r.program_id.startswith(_STREAM)
        and r.first_token_s >= begun_s
        and r.departure_s <= ended_s
    ]
    return {"tpot_p99_s": _tpot_p99_s(streams), "stream_turns": len(streams)}


def _tpot_p99_s(records: Iterable[TurnRecord]) -> float:
    """Of a turn: seconds from first to last token, by the tokens after the first."""
    tpots = (
        (r.departure_s - r.first_token_s) / (len(r.output_token_ids) - 1)
        for r in records
        if len(r.output_token_ids) > 1
    )
    return percentile(list(tpots), 99)


def _sound(stage: Stage) -> list[Check]:
    """No request failed, no server logged an error."""
    played = [cell for cell in stage.cells.values() if "failures" in cell]
    return [
        equal("failed requests", sum(len(cell["failures"]) for cell in played), 0),
        equal("errors in logs", sum(len(cell["log_errors"]) for cell in played), 0),
    ]


def _at_least(name: str, found: float, allowed: float) -> Check:
    return Check(name, found >= allowed, f"{found:,.4g}", f">= {allowed:,.4g}")
