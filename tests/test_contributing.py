"""The examples of CONTRIBUTING.md run; what is beside it on the first page is valid."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from check_jsonschema.cli import main as check_jsonschema
from click.testing import CliRunner

from bench.cli import app as bench_app
from tests.commands import output_of
from tests.documented import ROOT, commands
from ttlcache.toolcalls import chain, detect
from ttlcache.types import GapKey
from ttlcache_sim.load import readers
from ttlcache_sim.load.traces import TraceError
from ttlcache_sim.load.workload import recorded_programs

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
_EXAMPLE = re.compile(r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", re.M | re.S)
EXAMPLES = dict(_EXAMPLE.findall(PAGE))
#: Options that make a simulation one of seconds.
SMALL = ["--programs", "2", "--rate", "0.5", "--blocks", "1500"]
SMALL += ["--processes", "1", "--no-cache"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def simulate(word: str) -> None:
    """The page's `bench sim` command with this word in it, on small programs."""
    (command,) = (
        c for c in commands() if c.page == "CONTRIBUTING.md" and word in c.text
    )
    words = command.text.removeprefix("python -m bench ").split()
    output_of(bench_app, *words, *SMALL, "--out", "result.json")
    assert "jct" in Path("result.json").read_text()


def test_the_policy_passes_its_own_tests():
    Path("test_patient.py").write_text(EXAMPLES["A policy"])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^1\d passed", done.stdout, re.MULTILINE), done.stdout


def test_the_format_is_read_beside_ours(monkeypatch):
    Path("arrows.py").write_text(EXAMPLES["A format of tool calls"])
    arrows = runpy.run_path("arrows.py")["arrows"]
    output = "I run the tests.\n>>> bash(pytest -q)\n"
    assert detect(output) is None
    monkeypatch.setattr(chain, "_TAGGED", (*chain._TAGGED, arrows))
    assert detect(output) == GapKey("bash", "pytest")
    assert detect("No call >>> here().") is None


def test_the_reader_is_one_of_ours(monkeypatch):
    text = EXAMPLES["A trace reader"]
    (line,) = re.findall(r'# (\{"job".*\})$', text, re.MULTILINE)
    Path("mine.py").write_text(text)
    Path("mine.jsonl").write_text(line + "\n")
    with pytest.raises(TraceError, match="in no known format"):
        recorded_programs(Path("mine.jsonl"), "")
    own = runpy.run_path("mine.py")["READER"]
    monkeypatch.setattr(readers, "READERS", (*readers.READERS, own))
    ((first, second),) = recorded_programs(Path("mine.jsonl"), "")
    assert (first.new_prompt_tokens, first.output_tokens) == (900, 40)
    assert (first.gap_s, second.new_prompt_tokens) == (1.5, 80)
    pytest.importorskip("vllm")
    simulate("trace:mine.jsonl")


def test_the_rival_runs():
    pytest.importorskip("vllm")
    Path("my_arm.py").write_text(EXAMPLES["A rival"])
    simulate("my_arm.py")
    assert '"mine"' in Path("result.json").read_text()


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize(
    ("schema", "file"),
    [
        ("vendor.citation-file-format", ROOT / "CITATION.cff"),
        ("vendor.compose-spec", ROOT / "deploy" / "compose" / "compose.yaml"),
        *(("vendor.github-issue-forms", form) for form in FORMS),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_files_for_other_programs_are_valid(schema, file):
    result = CliRunner().invoke(
        check_jsonschema, ["--builtin-schema", schema, str(file)]
    )
    assert result.exit_code == 0, result.output


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["version"], cited["license"]) == (
        project["version"],
        project["license"],
    )
    assert cited["references"][0]["url"].endswith("2511.02230")
