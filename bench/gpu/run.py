"""`python -m bench gpu`: stages in processes of their own, within time limits."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import typer
from rich.console import Console

from bench.command import one_of
from bench.gpu.sizes import DEVICE, REHEARSAL, Sizes
from bench.gpu.stage import ROOT, Json, Stage, device_name, machine, read
from bench.gpu.stages import STAGES
from bench.tables import Check, checks_table
from ttlcache.cli.command import command, option

NO_DEVICE = 3
#: Its module `cupy` runs device code on the CPU.
STAND_IN = ROOT / "tests" / "stand_in"
#: Cheap, and out of date whenever something changed: never resumed.
_ALWAYS_RUN = ("preflight", "pictures")
#: Of what the others found.
_LAST = "pictures"
_REHEARSED_AT_ONCE = 2
#: For servers to stop after SIGTERM, before SIGKILL.
_GRACE_S = 30.0
#: With less, no stage begins.
_MIN_STAGE_S = 10.0


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Which stages, for how long, and where their results are."""

    stage: list[str] = option([], f"Only these, of {', '.join(STAGES)}.")
    limit_s: float = option(2400.0, "Seconds of all stages together.", min=0)
    stage_limit_s: float = option(480.0, "Seconds of one stage.", min=0)
    out: Path = option(Path("out/gpu"), "Folder for the results.")
    resume: bool = option(
        True,
        "Keep what --out already has of this machine.",
        "--resume/--again",
    )
    server_args: str = option("", "More arguments of every vLLM, as --enforce-eager.")
    rehearse: bool = option(
        False, "Without a GPU: a stand-in for CuPy, vLLM for CPU, a tiny model."
    )
    alone: bool = option(False, "The stage in this process, without a limit.")

    def __post_init__(self) -> None:
        for name in self.stage:
            one_of("--stage", name, STAGES)
        if self.alone and len(self.stage) != 1:
            raise ValueError("--alone: give one --stage")

    @property
    def names(self) -> list[str]:
        return [name for name in STAGES if name in self.stage or not self.stage]

    @property
    def sizes(self) -> Sizes:
        sizes = REHEARSAL if self.rehearse else DEVICE
        return sizes.with_server_args(tuple(shlex.split(self.server_args)))

    @property
    def header(self) -> Json:
        """What results must have in common to be resumed."""
        digest = hashlib.sha256(repr(self.sizes).encode()).hexdigest()[:12]
        return {
            "machine": machine(self.sizes),
            "server_args": self.server_args,
            "sizes": digest,
        }


def gpu(options: GpuOptions, console: Console) -> int:
    """What only a GPU can answer. 0: all bars hold, 1: one does not, 3: no device."""
    if not options.rehearse and device_name() is None:
        console.print("not run: no CUDA device (libcuda.so.1 shows none)")
        return NO_DEVICE
    options.out.mkdir(parents=True, exist_ok=True)
    header = options.header
    if options.alone:
        (name,) = options.names
        stage = Stage(name, options.sizes, options.out, header)
        stage.write("done", STAGES[name](stage))
        return 0
    began_s = time.monotonic()
    run = partial(
        _run, options=options, header=header, began_s=began_s, console=console
    )
    names = [name for name in options.names if name != _LAST]
    if options.rehearse:  # a server takes one core for its start
        with ThreadPoolExecutor(_REHEARSED_AT_ONCE) as pool:
            ends = list(pool.map(run, names))
    else:
        ends = [run(name) for name in names]
    ends += [run(_LAST)] if _LAST in options.names else []
    return 0 if all(ends) else 1


def _run(
    name: str, *, options: GpuOptions, header: Json, began_s: float, console: Console
) -> bool:
    """Run a stage unless it is done; whether it ran and all that is judged holds."""
    found = read(options.out, name)
    is_same = {key: found.get(key) for key in header} == header
    is_done = is_same and found["status"] == "done" and name not in _ALWAYS_RUN
    if options.resume and is_done:
        console.print(f"{name}: done before")
    else:
        if not options.resume:
            (options.out / f"{name}.json").unlink(missing_ok=True)
        left_s = options.limit_s - (time.monotonic() - began_s)
        limit_s = min(left_s, options.stage_limit_s)
        if limit_s < _MIN_STAGE_S:
            console.print(f"{name}: not run: no time is left; run again to resume")
            return False
        end = _in_process(name, options, limit_s)
        if end:  # what it measured stays for the next run
            Stage(name, options.sizes, options.out, header).write(end)
            log = options.out / f"{name}.log"
            tail = log.read_text(errors="replace").splitlines()[-15:]
            console.print(f"[red]{name}: {end}[/]; {log} ends with", soft_wrap=True)
            console.print("\n".join(tail), markup=False, highlight=False)
            return False
        found = read(options.out, name)
    checks = [Check(**check) for check in found["checks"]]
    bars = [Check(**bar) for bar in found["bars"]]
    if options.rehearse:
        bars = [Check(f"{bar.name} (no GPU)", None, bar.found) for bar in bars]
    title = f"{name}: {found['machine']['gpu']}, {found['seconds']:.0f} s"
    console.print(checks_table(title, [*checks, *bars]))
    return all(check.ok is not False for check in (*checks, *bars))


def _in_process(name: str, options: GpuOptions, limit_s: float) -> str:
    """How the stage ended, where it did not end well."""
    words = ["gpu", "--alone", "--stage", name, "--out", str(options.out)]
    words += ["--server-args", options.server_args]
    words += ["--rehearse"] * options.rehearse
    folders = [str(STAND_IN)] if options.rehearse else []
    folders += [str(ROOT), str(ROOT / "connector"), os.environ.get("PYTHONPATH", "")]
    with (options.out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench", *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except BaseException as error:
            _stop(process)
            if isinstance(error, subprocess.TimeoutExpired):
                return f"stopped after {limit_s:.0f} s"
            raise
    return f"failed with exit status {status}" if status else ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, which stops its servers; then SIGKILL to all that it started."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        if child.is_running():
            child.kill()


app = typer.Typer(add_completion=False)
app.command()(command(gpu))
