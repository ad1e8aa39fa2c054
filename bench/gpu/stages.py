"""The stages of `bench gpu`, in order."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from xml.etree import ElementTree

from rich.console import Console

from bench.compare.pin_vs_reload import pin_vs_reload
from bench.compare.profile import measure_profile
from bench.gpu.device import preflight
from bench.gpu.serve import serve, tokens
from bench.gpu.stage import ROOT, Json, Stage, Verdict, read
from bench.gpu.window import WINDOWS, load_beside_small_copies
from bench.micro.transfer_cli import transfer
from bench.serve import tiny_model
from bench.tables import Check, at_most, equal
from ttlcache_sim.steps.hardware import HARDWARE
from ttlcache_sim.steps.models import MODELS
from ttlcache_sim.steps.profile import Profile
from ttlcache_sim.steps.steptime import Roofline

#: In the phases of a profile with fewer at once.
_PROFILED_PROGRAMS = 4


def contract(stage: Stage) -> Verdict:
    """The tests of `tests/gpu`, in a process of their own."""
    counts = stage.cell("tests", partial(_run_tests, stage))
    faults = counts["failures"] + counts["errors"]
    return Verdict(
        [
            equal("tests that failed", faults, 0),
            equal("pytest's exit status", counts["status"], 0),
            Check("tests that ran", counts["ran"] > 0, str(counts["ran"]), "> 0"),
        ],
        [equal("tests that were skipped", counts["skipped"], 0)],
    )


def _run_tests(stage: Stage) -> Json:
    report = (stage.folder / "contract.xml").absolute()
    words = ("-m", "pytest", "-q", "-m", "gpu", "tests/gpu", f"--junitxml={report}")
    report.unlink(missing_ok=True)
    done = subprocess.run((sys.executable, *words), cwd=ROOT, check=False)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    if suite is None:
        raise RuntimeError(f"{report} names no tests")
    count = {key: int(suite.attrib[key]) for key in ("failures", "errors", "skipped")}
    ran = int(suite.attrib["tests"]) - count["skipped"]
    bad = [
        f"{case.get('classname')}::{case.get('name')}: {fault.get('message')}"[:300]
        for case in suite.iter("testcase")
        for fault in (*case.iter("failure"), *case.iter("error"))
    ]
    return {**count, "ran": ran, "status": done.returncode, "failed": bad}


def copies(stage: Stage) -> Verdict:
    """`bench transfer`; loads beside small copies, by what is in flight."""
    folder = stage.folder / "transfer"

    def measure() -> Json:
        transfer(replace(stage.sizes.transfer, out=folder), Console())
        return read(folder, "transfer")

    found = stage.cell("transfer", measure)
    for window in WINDOWS:
        cell = partial(load_beside_small_copies, stage.sizes.pinned_bytes, *window)
        stage.cell("{} parts of {} MiB in flight".format(*window), cell)
    ours = {row["arm"] for row in found["rows"]} & {"cupy"}
    return Verdict(
        [
            equal("arms that moved wrong bytes", len(found["wrong"]), 0),
            equal("engines of ours that ran", len(ours), 1),
        ],
        [Check(**bar) for bar in found["bars"]],
    )


def steps(stage: Stage) -> Verdict:
    """Seconds of a step, fitted on the demo's agents; prefills that follow from it."""
    programs = min(stage.sizes.serve.programs, _PROFILED_PROGRAMS)
    out = stage.folder / "profile"
    agents = replace(stage.sizes.serve, programs=programs, out=out)
    model = tiny_model.build(stage.folder / f"model-{stage.name}", shape=agents.shape)
    console, gpu = Console(file=sys.stderr), stage.machine["gpu"]
    found = Profile.of(
        stage.cell(
            "profile",
            lambda: asdict(
                replace(measure_profile(agents, model, console), machine=gpu)
            ),
        )
    )
    chunk = round(found.largest_sums[0])  # whatever the server's arguments say
    for length in stage.sizes.pin_vs_reload.lengths:
        cell = partial(_prefill, length, chunk, found)
        stage.cell(f"prefill {length}", cell)
    error, limit = found.held_out_error, found.max_held_out_error
    return Verdict(bars=[at_most("median error of a held-out step", error, limit, "")])


def _prefill(tokens: int, chunk: int, found: Profile) -> Json:
    gpu = found.machine.lower()
    names = (name for name in HARDWARE if name.partition("-")[0] in gpu)
    hardware = next(names, "h100")
    roofline = Roofline.of(HARDWARE[hardware], MODELS["llama-3.1-8b"])
    return {
        "tokens": tokens,
        "profile_s": found.prefill_s(tokens, chunk),
        "roofline_s": roofline.prefill_s(tokens, chunk),
        "roofline": f"llama-3.1-8b on {hardware}",
    }


def reloads(stage: Stage) -> Verdict:
    """`bench pin-vs-reload`."""
    folder = stage.folder / "pin-vs-reload"

    def measure() -> Json:
        model = stage.folder / f"model-{stage.name}"
        options = replace(stage.sizes.pin_vs_reload, out=folder, model=model)
        pin_vs_reload(options, Console())
        return read(folder, "result")

    found = stage.cell("pin-vs-reload", measure)["recoveries"]
    slow = [row for row in found if row["cpu_s"] >= row["prefill_s"]]
    return Verdict(bars=[equal("lengths reloaded later than prefilled", len(slow), 0)])


def pictures(stage: Stage) -> Verdict:
    """PNG of what the other stages found."""
    from bench.report.figures.plots import draw  # only here matplotlib is needed

    folder = stage.folder / "pictures"
    pages = {
        "serve": _jct_by_load,
        "steps": _steps,
        "transfer": _speeds,
    }
    drawn = []
    for name, page in pages.items():
        if rows := page(read(stage.folder, name).get("cells", {})):
            draw(f"gpu-{name}", _sweep(name, rows, stage.machine), folder)
            drawn.append(name)
    waits = read(stage.folder, "pin-vs-reload").get("cells", {})
    if waits:
        draw("pin-vs-reload", waits["pin-vs-reload"], folder)
        drawn.append("pin-vs-reload")
    files = {path.name for path in folder.glob("*.png")}
    return Verdict([equal("pictures drawn", len(files), len(drawn))])


def _sweep(name: str, rows: list[Json], machine: Mapping[str, str]) -> Json:
    """As `bench.report.figures` has them."""
    (key,) = rows[0].keys() - {"x", "arm"}
    title = f"{name} on {machine['gpu']}"
    return {"rows": rows, "x": "", "title": title, "programs": "", "drawn": (key, key)}


def _jct_by_load(cells: Mapping[str, Any]) -> list[Json]:
    split = ((name.partition(", "), cell) for name, cell in cells.items())
    return [
        {"x": load, "arm": arm, "mean_jct_s": cell["mean_jct_s"]}
        for (arm, _, load), cell in split
        if load.endswith("/s")
    ]


def _steps(cells: Mapping[str, Any]) -> list[Json]:
    return [
        {"x": f"{cell['tokens']}", "arm": arm, "prefill_s": cell[key]}
        for cell in cells.values()
        if "profile_s" in cell
        for arm, key in (("vLLM", "profile_s"), ("roofline", "roofline_s"))
    ]


def _speeds(cells: Mapping[str, Any]) -> list[Json]:
    return [
        {
            "x": f"{row['shape']['layout']}/{row['shape']['page_bytes'] >> 10}",
            "arm": f"{row['arm']} {row['direction']}",
            "gb_per_s": row["gb_per_s"],
        }
        for row in cells.get("transfer", {}).get("rows", ())
        if row["arm"] in ("one copy", "cupy")
    ]


STAGES: Mapping[str, Callable[[Stage], Verdict]] = {
    "preflight": preflight,
    "contract": contract,
    "transfer": copies,
    "tokens": tokens,
    "steps": steps,
    "serve": serve,
    "pin-vs-reload": reloads,
    "pictures": pictures,
}
