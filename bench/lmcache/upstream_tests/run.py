"""Runs the chosen tests in a process of their own, and prints what became of them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from bench.command import REQUIRED, option
from bench.lmcache.upstream_tests.chosen import FILES, NO_PLACE

_PLUGIN = "bench.lmcache.upstream_tests.stand_ins"
#: The property of a test that used one of ours, as `stand_ins` writes it.
_REACHED = "ttlcache_reached"
_CANNOT = "cannot: "
_TIMEOUT_S = 300.0


class Outcome(StrEnum):
    """What became of a test."""

    PASSED = "passed"
    FAILED = "failed"
    CANNOT = "cannot"
    SKIPPED = "skipped"  # by LMCache itself
    ELSEWHERE = "elsewhere"  # passed, without one of ours


@dataclass(frozen=True, slots=True)
class TestResult:
    """What became of one test; `text` is the reason or the failure."""

    file: str
    name: str
    outcome: Outcome
    text: str = ""


@dataclass(frozen=True, slots=True)
class UpstreamOptions:
    """Where the tests are."""

    source: Path = option(
        REQUIRED, "An LMCache checkout, or its unpacked source distribution."
    )


def lmcache_tests(options: UpstreamOptions, console: Console) -> int:
    """LMCache's own tests, unmodified, against our plugins.

    Status 0: every test that can run against them passed, and some did.
    """
    source = options.source
    if not (source / "tests" / "v1").is_dir():
        console.print(f"{source}: no LMCache source (there is no tests/v1)")
        return 2
    console.print(f"LMCache {importlib.metadata.version('lmcache')} installed")
    console.print(f"tests from {source}{_version_of(source)}")
    with tempfile.TemporaryDirectory() as folder:
        results = _results(source, Path(folder))
    _print(results, console)
    outcomes = Counter(each.outcome for each in results)
    bad = outcomes[Outcome.FAILED] or not outcomes[Outcome.PASSED]
    return 1 if bad else 0


def _results(source: Path, folder: Path) -> list[TestResult]:
    # A copy of the tests alone: the source's own `lmcache` must not be imported.
    shutil.copytree(source / "tests", folder / "tests")
    for name in ("pytest.ini",):
        if (source / name).is_file():
            shutil.copy(source / name, folder)
    there = [f"tests/v1/{name}" for name in FILES]
    there = [name for name in there if (folder / name).is_file()]
    report = folder / "report.xml"
    here = str(Path(__file__).resolve().parents[3])
    path = [here, str(Path(here, "connector")), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", _PLUGIN),
            *("-p", "no:cacheprovider", "-o", "log_cli=false"),
            *("--timeout", f"{_TIMEOUT_S:g}", "--junitxml", str(report)),
            *there,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        check=False,
    )
    if not report.is_file():
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RuntimeError(f"LMCache's tests did not run:\n{tail}")
    return read_report(report)


def read_report(report: Path) -> list[TestResult]:
    """What pytest wrote as JUnit XML."""
    return [_read(case) for case in ElementTree.parse(report).iter("testcase")]


def _read(case: ElementTree.Element) -> TestResult:
    module = case.get("classname") or case.get("name") or ""
    parts = [part for part in module.split(".") if not part.startswith("Test")]
    file = "/".join(parts[2:] if parts[:2] == ["tests", "v1"] else parts) + ".py"
    name = case.get("name", "")
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            return TestResult(file, name, Outcome.FAILED, found.get("message", ""))
    skipped = case.find("skipped")
    if skipped is not None:
        text = skipped.get("message", "")
        if text.startswith(_CANNOT):
            reason = text.removeprefix(_CANNOT)
            return TestResult(file, name, Outcome.CANNOT, reason)
        return TestResult(file, name, Outcome.SKIPPED, text)
    reached = sum(
        int(each.get("value", "0"))
        for each in case.iter("property")
        if each.get("name") == _REACHED
    )
    return TestResult(file, name, Outcome.PASSED if reached else Outcome.ELSEWHERE)


def _print(results: Sequence[TestResult], console: Console) -> None:
    counts: dict[str, Counter[Outcome]] = {}
    for each in results:
        counts.setdefault(each.file, Counter())[each.outcome] += 1
    table = Table("file below tests/v1", *(outcome.value for outcome in Outcome))
    for file, found in counts.items():
        table.add_row(file, *(str(found[outcome] or "") for outcome in Outcome))
    total = sum(counts.values(), Counter[Outcome]())
    table.add_section()
    table.add_row("all", *(str(total[outcome]) for outcome in Outcome))
    console.print(table)
    console.print("passed: with one of ours; elsewhere: passed, but used none of ours")
    for outcome in (Outcome.FAILED, Outcome.SKIPPED):
        for each in (r for r in results if r.outcome is outcome):
            line = each.text.splitlines()[0] if each.text else ""
            console.print(f"{outcome}: {each.file} {each.name}: {line}", markup=False)
    console.print("\nCannot run against a plugin:")
    reasons = Counter(
        (each.file, each.text) for each in results if each.outcome is Outcome.CANNOT
    )
    for (file, reason), number in reasons.items():
        console.print(f"- {file}: {number} tests: {reason}", markup=False)
    for file, reason in NO_PLACE.items():
        console.print(f"- {file}: all tests: {reason}", markup=False)


def _version_of(source: Path) -> str:
    info = source / "PKG-INFO"
    if not info.is_file():
        return ""
    found = re.search(r"^Version: (.+)$", info.read_text(), re.MULTILINE)
    return f", version {found[1]}" if found else ""
