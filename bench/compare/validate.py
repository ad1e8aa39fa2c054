"""`python -m bench validate`: does the simulator predict real servers?

The same programs and pool on real vLLM, several times, and in virtual time with the
step times that `bench profile` measured there. Every arm at every load is a cell; its
prediction holds if it is within `TOLERANCE` of the mean of the real runs, or between
them. A run counts only if its server hardly ever waited for a core.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.command import command_line, versions, write_json
from bench.compare.agents import CONNECTOR, AgentOptions
from bench.compare.profile import cpu_name, measure_profile, print_profile
from bench.compare.rounds import in_turn, turns_shown
from bench.serve import tiny_model
from bench.serve.arms import Arm as ServedArm
from bench.serve.arms import play, serving
from bench.sim.rivals.arms import Arm, parse_arms
from bench.sim.run import source_hash
from bench.sim.settings import Cell, EngineSetting
from bench.tables import Check, checks_table, table
from ttlcache.cli.command import option
from ttlcache.policies import SHIPPED
from ttlcache_sim.load.reshape import mean_context
from ttlcache_sim.load.workload import Workload, WorkloadSpec
from ttlcache_sim.steps.profile import Profile, load_profile

TOLERANCE = 0.10
MAX_WAIT_SHARE = 0.05
#: What a prediction is judged by, and what is only shown beside it.
JUDGED = ("mean_jct_s", "prompt_hit")
_TABLE_WIDTH = 190
SHOWN = (*JUDGED, "p50_jct_s", "p95_jct_s", "mean_ttft_s", "p99_turn_s")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ValidateOptions(AgentOptions):
    """rates: one a load. Runs that out/runs.json has are not repeated."""

    programs: int = option(16, "How many agents.", min=1)
    token_scale: float = option(0.04, "Factor on the paper's token counts.")
    blocks: int = option(256, "KV pool, in blocks of 32 tokens.", min=16)
    arms: str = option("vllm,cachettl,adaptive", "As for sim.")
    rates: tuple[float, ...] = option((0.15, 0.25, 0.5), "Arrivals a second, by load.")
    rounds: int = option(3, "Real runs of each cell.", min=1)
    profile: Path | None = option(None, "Of this machine; measured if not given.")
    out: Path = Path("out/validate")


@dataclass(frozen=True, slots=True)
class Compared:
    """A cell: what was predicted, and each real run that counts."""

    name: str
    predicted: Mapping[str, float]
    measured: Sequence[Mapping[str, float]] = field(default_factory=list)

    def error(self, what: str) -> float:
        """Relative, against the mean of the runs."""
        mean = statistics.fmean(run[what] for run in self.measured)
        return self.predicted[what] / mean - 1.0

    def holds(self, what: str) -> bool:
        found = [run[what] for run in self.measured]
        inside = min(found) <= self.predicted[what] <= max(found)
        return inside or abs(self.error(what)) <= TOLERANCE


def validate(options: ValidateOptions, console: Console) -> int:
    """Real servers against the simulator with their own step times."""
    arms = parse_arms(options.arms)
    for arm in arms:
        _check_servable(arm)
    found = _profile(options, console)
    cells = [(arm, rate) for rate in options.rates for arm in arms]
    runs = Runs(options.out / "runs.json", _header(options))
    _measure(options, cells, runs, console)
    compared = [
        Compared(
            _name(arm, rate),
            predict(options, arm, rate),
            runs.counted(_name(arm, rate)),
        )
        for arm, rate in cells
    ]
    checks = [
        *_checks(compared, options.rounds),
        *orders(options, arms, compared),
        _step_check(found),
    ]
    write_json(
        options.out / "result.json",
        {
            "cells": [asdict(each) for each in compared],
            "checks": [asdict(check) for check in checks],
            "discarded": runs.discarded,
            "profile": asdict(found),
            "options": asdict(options),
            "versions": versions(),
            "command": command_line(),
        },
    )
    # Redirected output is 80 columns wide to rich: numbers would be cut.
    wide = Console(width=max(console.width, _TABLE_WIDTH), file=console.file)
    wide.print(_table(compared))
    console.print(checks_table("predicted against measured", checks))
    return 0 if all(check.ok for check in checks) else 1


def _check_servable(arm: Arm) -> None:
    """A server knows ttlcache's own settings, and nothing that only the bench has."""
    known = arm.extra is None or (arm.extra_config(1.0) or {}).get("policy") in SHIPPED
    if not known or arm.gate or arm.tell_gap or arm.tell_work or arm.ablation:
        raise ValueError(f"arm {arm.name!r}: only the simulator has it")


def predict(options: ValidateOptions, arm: Arm, rate: float) -> Json:
    """The metrics of a cell in virtual time."""
    from ttlcache_sim.cell import run_cell  # imports vLLM

    programs = replace(options, rate=rate).workload()
    spec = WorkloadSpec("as given", len(programs), rate, options.seed)
    cell = Cell(arm, _engine(options), spec)
    return run_cell(cell, Workload(programs)).metrics


def _engine(options: ValidateOptions) -> EngineSetting:
    server = options.server(None)
    return EngineSetting(
        blocks=server.num_blocks,
        block_size=server.block_size,
        max_num_seqs=server.max_num_seqs,
        max_num_batched_tokens=server.max_num_batched_tokens,
        tell_last=options.hints,
        profile=_profile_path(options),
    )


class Runs:
    """Real runs so far, in a file; one of other runs is moved aside."""

    def __init__(self, path: Path, header: Json) -> None:
        found: Json = json.loads(path.read_text()) if path.exists() else {}
        self._path, self._header = path, json.loads(json.dumps(header, default=str))
        same = found.get("header") == self._header
        if found and not same:
            path.replace(path.with_suffix(f".{int(path.stat().st_mtime)}.json"))
        self._runs: dict[str, list[Json]] = found["runs"] if same else {}

    def counted(self, name: str) -> list[Json]:
        """Those whose server hardly waited for a core."""
        runs = self._runs.get(name, [])
        return [run for run in runs if run["wait_share"] <= MAX_WAIT_SHARE]

    @property
    def discarded(self) -> int:
        """Runs that do not count."""
        return sum(len(runs) - len(self.counted(name)) for name, runs in self)

    def __iter__(self) -> Iterator[tuple[str, list[Json]]]:
        return iter(self._runs.items())

    def add(self, name: str, run: Json) -> None:
        self._runs.setdefault(name, []).append(run)
        write_json(self._path, {"header": self._header, "runs": self._runs})


def _header(options: ValidateOptions) -> Json:
    """What runs must have in common to be of one cell."""
    left_out = ("rounds", "rates", "arms", "profile", "out", "model")
    own = {k: v for k, v in asdict(options).items() if k not in left_out}
    return {
        "options": own,
        "versions": versions(),
        "machine": [cpu_name(), platform.node()],
        "sources": source_hash(),
    }


def _profile_path(options: ValidateOptions) -> Path:
    return options.profile or options.out / "profile.json"


def _profile(options: ValidateOptions, console: Console) -> Profile:
    path = _profile_path(options)
    if options.profile is None and not path.exists():
        own = replace(options, programs=8, seed=1000, out=options.out / "profile")
        measure_profile(own, tiny_model.build(options.model), console).write(path)
    found = load_profile(path)
    if found.machine != cpu_name():
        raise ValueError(f"profile {path} is of {found.machine}, not of {cpu_name()}")
    print_profile(found, console)
    return found


def _measure(
    options: ValidateOptions,
    cells: Sequence[tuple[Arm, float]],
    runs: Runs,
    console: Console,
) -> None:
    model = tiny_model.build(options.model)
    for number, (arm, rate) in in_turn(cells, options.rounds):
        name = _name(arm, rate)
        if len(runs.counted(name)) > number:
            continue
        programs = replace(options, rate=rate).workload()
        transfer = _transfer(options, arm)
        served = ServedArm(arm.name, options.server(transfer))
        log = options.out / f"server-{arm.name}.log"
        with (
            turns_shown(f"{name}, run {number + 1}", programs, console) as on_turn,
            serving(served, model, log) as server,
        ):
            played = play(server, programs, options.replay(), on_turn)
        if errors := server.errors_in_log():
            raise RuntimeError(f"{name}: {errors[0]}")
        if played.failures:
            raise RuntimeError(f"{name}: {played.failures[0].reason}")
        counted = {"pins": dict(played.engine.pins), "wait_share": played.wait_share}
        runs.add(name, {**asdict(played.summary), **counted})


def _transfer(options: ValidateOptions, arm: Arm) -> Json | None:
    """What the simulated arm has, for a server."""
    extra = arm.engine_config(_prefill_s(options), above_tier=False)
    if extra is None:
        return None
    return {**CONNECTOR, "kv_connector_extra_config": extra}


def _prefill_s(options: ValidateOptions) -> float:
    engine, mean = _engine(options), mean_context(options.workload())
    return engine.step_time.prefill_s(round(mean), engine.max_num_batched_tokens)


def _name(arm: Arm, rate: float) -> str:
    return f"{arm.name} at {rate:g}/s"


def _checks(compared: Sequence[Compared], rounds: int) -> list[Check]:
    return [
        Check(
            f"{each.name}: runs that count",
            len(each.measured) >= rounds,
            f"{len(each.measured)}",
            f"{rounds}",
        )
        for each in compared
    ] + [
        Check(
            f"{each.name}: {what}",
            each.holds(what),
            f"{each.error(what):+.1%}",
            f"{TOLERANCE:.0%}, or between the runs",
        )
        for each in compared
        for what in JUDGED
        if each.measured
    ]


def orders(
    options: ValidateOptions, arms: Sequence[Arm], compared: Sequence[Compared]
) -> list[Check]:
    """Whether arms stand in the same order at each load, by mean JCT."""
    by_name = {each.name: each for each in compared}
    checks = []
    for rate in options.rates:
        own = [by_name[_name(arm, rate)] for arm in arms]
        if not all(each.measured for each in own):
            continue
        real = sorted(own, key=lambda each: _mean(each, "mean_jct_s"))
        told = sorted(own, key=lambda each: each.predicted["mean_jct_s"])
        names = " < ".join(each.name.partition(" ")[0] for each in told)
        wanted = " < ".join(each.name.partition(" ")[0] for each in real)
        checks.append(Check(f"order at {rate:g}/s", names == wanted, names, wanted))
    return checks


def _mean(each: Compared, what: str) -> float:
    return statistics.fmean(run[what] for run in each.measured)


def _step_check(found: Profile) -> Check:
    error = found.held_out_error
    limit = found.max_held_out_error
    return Check(
        "held-out step, median error", error <= limit, f"{error:.1%}", f"{limit:.1%}"
    )


def _table(compared: Sequence[Compared]) -> Any:
    rows = []
    for each in compared:
        if not each.measured:
            continue
        cells = [f"{len(each.measured)}"]
        for what in SHOWN:
            runs = sorted(run[what] for run in each.measured)
            cells.append(
                f"{each.predicted[what]:.3g} for {_mean(each, what):.3g} "
                f"({runs[0]:.3g}-{runs[-1]:.3g})"
            )
        rows.append([each.name, *cells])
    return table("predicted for measured (range)", ["", "runs", *SHOWN], rows)
