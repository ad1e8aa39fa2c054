"""`python -m bench harness NAME`: others' load generators, as they are published.

Each runs from its first line to its last against vLLM, plain or with LMCache, and
against vLLM with TTLConnector, in alternating order, on fresh servers. The numbers are
the load generator's own; a pair of runs has the same data. docs/benchmarks.md shows a
result.json that is committed as bench/results/harness-NAME.json.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.command import one_of
from bench.compare.agents import CONNECTOR, LMCACHE, ComparisonOptions, arm_of
from bench.compare.harness_clients import HARNESSES, Harness, Load
from bench.compare.rounds import play_rounds
from bench.ratios import Ratio
from bench.serve import tiny_model
from bench.serve.arms import EngineCounters, read_engine, serving
from bench.tables import table
from ttlcache.cli.command import argument, option

BASE, OURS = "base", "ttlcache"
#: What it may be compared with.
BASES = {"vanilla": None, "lmcache": LMCACHE}


@dataclass(frozen=True, slots=True)
class HarnessOptions(ComparisonOptions):
    """Agents in the format of the load generator."""

    programs: int = 24
    blocks: int = 513
    token_scale: float = 0.07
    gap_cap_s: float = 3.0
    _: KW_ONLY
    name: str = argument(f"One of {', '.join(HARNESSES)}.")
    rounds: int = option(3, "Pairs of runs, each with other data.", min=1)
    against: str = option("vanilla", "vanilla or lmcache: its own connector.")
    at_once: int | None = option(18, "Agents at a time, where it asks for that.", min=1)
    run_limit_s: float = option(1200.0, "A run that takes longer failed.")
    out: Path = Path("out/harness")

    def __post_init__(self) -> None:
        one_of("load generator", self.name, HARNESSES)
        one_of("--against", self.against, BASES)


@dataclass(frozen=True, slots=True)
class HarnessRun:
    """One run against one server."""

    command: Sequence[str]
    exit_status: int
    metrics: Mapping[str, float]
    engine: EngineCounters
    log_errors: Sequence[str]


def harness(options: HarnessOptions, console: Console) -> int:
    """A load generator that others wrote, against vLLM without and with ttlcache."""
    settings = {BASE: BASES[options.against], OURS: CONNECTOR}
    chosen = HARNESSES[options.name]
    console.print(f"{options.name}: {chosen.package or 'comes with vLLM'}")
    program = install(chosen, options.out / "venvs" / options.name)
    options = replace(options, out=options.out / options.name)
    each = [
        # Arrivals stay as drawn: those that ask for a number of agents ignore them.
        replace(options, seed=options.seed + n, at_once=None).workload()
        for n in range(options.rounds)
    ]
    model = tiny_model.build(options.model).absolute()

    def play(name: str, number: int) -> HarnessRun:
        place = (options.out / f"round-{number}" / name).absolute()
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        arm = arm_of(name, settings[name], options)
        with serving(arm, model, place / "server.log") as server:
            load = Load(
                *(server.base_url, model, place, each[number]),
                *(options.at_once or 1, options.seed + number),
            )
            arguments = chosen.arguments(load)
            before = server.metrics()
            limit_s = options.run_limit_s
            status = _run([str(program), *arguments], chosen.env, place, limit_s)
            engine = read_engine(server, before)
        here = f"{Path.cwd()}/"
        told = [a.replace(f"{place}/", "").replace(here, "") for a in arguments]
        return HarnessRun(
            [chosen.program, *told],
            status,
            read_metrics(place / chosen.result, chosen.metrics),
            engine,
            server.errors_in_log(),
        )

    def results(done: list[dict[str, HarnessRun]]) -> tuple[dict[str, Any], list[str]]:
        runs = [(name, run) for each in done for name, run in each.items()]
        problems = [f"{n}: {line}" for n, run in runs for line in run.log_errors[:3]]
        problems += [
            f"{n}: {run.engine.hook_errors:g} hook errors"
            for n, run in runs
            if run.engine.hook_errors
        ]
        problems += [
            f"{n}: {chosen.program} ended with exit status {run.exit_status}"
            for n, run in runs
            if run.exit_status not in chosen.good_statuses
        ]
        told = {
            "package": chosen.package or "vLLM's own",
            "rows": rows([each for each in done if len(each) == len(settings)]),
            "rounds": [{n: asdict(run) for n, run in each.items()} for each in done],
        }
        return told, problems

    done, status = play_rounds(list(settings), options, console, play, results)
    title = f"{options.name}: its own metrics, mean of {options.rounds}"
    console.print(table(title, ("", options.against, OURS, "ratio"), rows(done)))
    return status


def rows(done: Sequence[Mapping[str, HarnessRun]]) -> list[list[str]]:
    """Each metric: its mean without and with ttlcache, and the ratio of the pairs."""
    found = []
    for metric in done[0][BASE].metrics if done else ():
        pairs = [[run[n].metrics[metric] for n in (BASE, OURS)] for run in done]
        means = [f"{statistics.fmean(each):,.4g}" for each in zip(*pairs, strict=True)]
        ratio = ""
        if all(value > 0 for pair in pairs for value in pair):
            of_pairs = Ratio(tuple(ours / base for base, ours in pairs))
            ratio = f"{of_pairs.by_round[0]:.3f}" if len(done) < 2 else str(of_pairs)
        found.append([metric, *means, ratio])
    return found


def read_metrics(path: Path, names: Sequence[str]) -> dict[str, float]:
    """Numbers of a load generator's results, by their paths.

    Raises:
        RuntimeError: it wrote none, or not these.
    """
    log = path.parent / "client.log"
    if not path.exists():
        raise RuntimeError(f"the load generator wrote no {path.name}: see {log}")
    written = json.loads(path.read_text())
    found = {}
    for name in names:
        values = [float(v) for v in _at(written, name.split(".")) if v is not None]
        if not values:
            raise RuntimeError(f"{path} has no {name}: see {log}")
        found[name] = statistics.fmean(values)
    return found


def _at(value: Any, path: Sequence[str]) -> list[Any]:
    if not path or value is None:
        return [value]
    if path[0] == "*":
        entries = value.values() if isinstance(value, dict) else value
        return [found for entry in entries for found in _at(entry, path[1:])]
    return _at(value.get(path[0]), path[1:])


def install(chosen: Harness, venv: Path) -> Path:
    """The program, its package installed into an environment of its own.

    Raises:
        RuntimeError: there is no such Python, or no such package.
    """
    if not chosen.package:
        return Path(sys.executable).parent / chosen.program
    own = venv / "bin" / "python"
    if not own.exists():
        subprocess.run([_python(chosen.python), "-m", "venv", venv], check=True)
    pip = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, chosen.package], capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["pip failed"]
        raise RuntimeError(f"{chosen.package} cannot be installed here: {last[0]}")
    return (venv / "bin" / chosen.program).absolute()


def _python(least: tuple[int, int]) -> str:
    """An interpreter of that version or a newer one."""
    test = ["-c", f"import sys; sys.exit(sys.version_info < {least})"]
    for name in (sys.executable, "python3.13", "python3.12"):
        # A version manager's shim may have nothing behind it.
        path = shutil.which(name)
        if path and subprocess.run([path, *test], capture_output=True).returncode == 0:
            return path
    raise RuntimeError(f"it needs Python {least[0]}.{least[1]} on the PATH")


def _run(
    command: Sequence[str], extra_env: Mapping[str, str], place: Path, limit_s: float
) -> int:
    """Exit status; what it printed is in client.log.

    Raises:
        RuntimeError: it took longer than `limit_s`.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", **extra_env}
    with (place / "client.log").open("wb") as log:
        process = subprocess.Popen(
            list(command),
            cwd=place,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it ran for over {limit_s:g} s: see {place}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
