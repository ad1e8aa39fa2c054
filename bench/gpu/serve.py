"""Stages with vLLM's server: equal tokens, and the demo's agents at several loads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from bench.compare.agents import arm_of
from bench.gpu.device import link_gb_per_s
from bench.gpu.stage import Json, Stage, Verdict
from bench.serve import tiny_model
from bench.serve.arms import play, serving
from bench.serve.server import VLLMServer
from bench.tables import Check, at_most, equal
from ttlcache_sim.load.programs import Program, Turn
from ttlcache_sim.metrics import TurnRecord, percentile

if TYPE_CHECKING:
    from bench.gpu.sizes import Beside, ServedAgents

#: Decode TPOT p99 beside copies, by the same without them.
MAX_TPOT_RATIO = 1.03
#: At a low load all arms are equal, up to this share.
NOISE = 0.02
#: Of a reload beside decode, of one pinned copy.
MIN_LINK_SHARE = 0.85
_BESIDE = "decode beside reloads"
_STREAM, _CONTEXT = "stream", "context"

#: Programs to replay, and what is read off their turns besides.
Workload = tuple[Sequence[Program], Callable[[Sequence[TurnRecord]], Json]]


def tokens(stage: Stage) -> Verdict:
    """Greedy tokens of seeded weights: equal in every arm."""
    agents = stage.sizes.tokens
    play_arms(stage, agents, lambda arm: {"tokens": (agents.workload(), _outputs)})
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
    """Mean JCT, hit share and turn p99 at three loads, and decodes beside copies."""
    sizes, agents = stage.sizes, stage.sizes.serve
    link = stage.cell("link", partial(link_gb_per_s, sizes.pinned_bytes))
    loads = {
        f"{rate:g}/s": replace(agents, rate=rate, seed=number).workload()
        for number, rate in enumerate(agents.loads)
    }

    def workloads(arm: str) -> Mapping[str, Workload]:
        found: dict[str, Workload] = {
            name: (programs, lambda _: {}) for name, programs in loads.items()
        }
        if arm in ("pins", "pins+cpu"):
            contexts = sizes.beside.contexts if arm == "pins+cpu" else 1
            found[_BESIDE] = (beside(sizes.beside, contexts), _decodes)
        return found

    play_arms(stage, agents, workloads)
    base, cells = agents.arms[0], stage.cells
    bars = []
    for load in loads:
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
    checks = [*_sound(stage), _at_least("bytes reloaded beside decode", reloaded, 1)]
    return Verdict(checks, bars)


def play_arms(
    stage: Stage,
    agents: ServedAgents,
    workloads: Callable[[str], Mapping[str, Workload]],
) -> None:
    """Every workload of every arm as the cell "arm, workload"; one server an arm."""
    model = tiny_model.build(stage.folder / f"model-{stage.name}", shape=agents.shape)
    for name in agents.arms:
        missing = {
            cell: workload
            for kind, workload in workloads(name).items()
            if (cell := f"{name}, {kind}") not in stage.cells
        }
        if not missing:
            continue
        arm = arm_of(name, agents.transfer(name), agents)
        log_path = stage.folder / f"{stage.name}-{name}.log"
        with serving(arm, model, log_path) as server:
            for cell, workload in missing.items():
                stage.cell(cell, partial(_played, server, agents, workload))


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
