"""Every command in README and docs is run: here, in tests/e2e, or as said below."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import typer
from rich.console import Console

from bench.cli import app as bench_app
from bench.sim.rivals.arms import parse_arms
from bench.surface.vllm_moved import find
from tests.bench.samples import record_job, recorded, write_trace
from tests.commands import output_of
from tests.documented import HEADER_NAMES, PAGES, ROOT, commands, of_benches
from ttlcache import policies
from ttlcache.cli.config import table
from ttlcache.cli.main import app
from ttlcache_sim.estimate.plan import EstimateOptions, plan_of
from ttlcache_sim.estimate.sessions import read_sessions

#: Kind of a command -> where it is run, or what checks it.
RUN = {
    "recording": "here",
    "tiers": "here, without starting them",
    "estimate": "parsed here; tests/bench/test_estimate.py runs it, smaller",
    "python": "parsed here; tests/bench runs the benches, smaller",
    "server": "tests/e2e/test_operations.py",
    "fleet": "tests/front/test_documented.py",
    "profile": "tests/e2e/test_benches.py",
    "make": "tests/test_readme.py",
    "vllm": "parsed here by vLLM's parser; tests/e2e serves with the flag",
    "pip": "tests/test_packaging.py builds what it would install",
    "lmcache": "tests/lmcache checks the flags, tests/e2e serves with them",
    "docker": "tests/test_deploy.py checks what it would build and start",
    "kubectl": "tests/test_deploy.py checks what it would apply",
    "export": "a client's own setting",
    "claude": "tests/e2e runs the CLI where npm has it",
}


@pytest.mark.parametrize("command", commands("recording"), ids=lambda c: c.text)
def test_commands_on_a_recording(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = record_job(tmp_path / "recording")
    replaced = {"/var/log/ttlcache": str(place), "PROGRAM": "job-17"}
    words = [replaced.get(word, word) for word in command.words[1:]]
    output_of(app, *words)


@pytest.mark.parametrize("command", commands("tiers"), ids=lambda c: c.text)
def test_commands_that_start_tiers(command):
    assert "vllm serve" in output_of(app, *command.words[1:], "--print-only")


@pytest.mark.parametrize("command", commands("vllm"), ids=lambda c: c.text)
def test_vllm_knows_its_flags(command):
    pytest.importorskip("vllm")
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = find("make_arg_parser")(FlexibleArgumentParser())
    given = parser.parse_args(command.words[2:])
    assert given.kv_transfer_config.kv_connector == "TTLConnector"
    if given.tool_call_parser:
        ToolParserManager.get_tool_parser(given.tool_call_parser)


@pytest.mark.parametrize("command", commands("estimate"), ids=lambda c: c.text)
def test_commands_that_estimate_are_accepted(command, tmp_path):
    """Their names are known, and the model fits."""
    name, *words = command.words[1:]
    estimate = typer.main.get_command(app).commands[name]
    given = estimate.make_context(name, words).params
    options = EstimateOptions(**given)
    log = write_trace(tmp_path / "log", recorded({}, {}))
    plan_of(options, read_sessions([log], Console(quiet=True)), log)


@pytest.mark.parametrize("command", of_benches(), ids=lambda c: c.text)
def test_commands_of_benches_are_accepted(command, tmp_path):
    """They take minutes to hours: names, options, values and arms are checked."""
    name, *words = command.words
    bench = typer.main.get_command(bench_app).commands[name]
    if not words:
        return  # names the command, which exists
    words = [str(tmp_path) if word in ("DIR", "TRACE…") else word for word in words]
    context = bench.make_context(name, words)
    if name == "sim" and "my_arm.py" not in command.text:
        assert parse_arms(context.params["arms"])


def test_no_command_is_left_out():
    kinds = Counter(command.kind for command in commands())
    assert kinds.keys() <= RUN.keys()
    for kind, least in (("recording", 4), ("server", 6), ("tiers", 1)):
        assert kinds[kind] >= least, kind
    assert len(of_benches()) >= 25


@pytest.mark.parametrize("command", commands(), ids=lambda c: c.text)
def test_every_line_is_shell(command):
    subprocess.run(["bash", "-n", "-c", command.text], check=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_other_blocks_parse(page):
    text = page.read_text()
    for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL):
        tomllib.loads(block)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        ast.parse(block)


LINKING = [*PAGES, *sorted((ROOT / "docs" / "research").glob("*.md"))]
LINKING.append(ROOT / "bench" / "README.md")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.replace(" ", "-") for text in kept}


@pytest.mark.parametrize("page", LINKING, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


#: Page of `docs/` or the root -> words, the generated tables included.
MAX_WORDS = {
    "README.md": 1000,
    "CHANGELOG.md": 500,
    "CONTRIBUTING.md": 400,
    "SECURITY.md": 350,
    "clients.md": 850,
    "configuration.md": 1200,
    "design.md": 1500,
    "estimate.md": 250,
    "fleet.md": 950,
    "lmcache.md": 1000,
    "operations.md": 1600,
    "policies.md": 900,
    "recipes.md": 300,
    "scheduling.md": 800,
    "tiers.md": 1050,
    # For reference: a table with a row an option, and what `bench figures` writes.
    "vllm-options.md": 1300,
    "benchmarks.md": 1500,
}


def words(page: Path) -> int:
    return len(page.read_text().split())


def test_pages_stay_short():
    """A page that outgrows its words: shorten it, or move measurements to research/."""
    pages = [ROOT / "CHANGELOG.md", *PAGES]
    assert {page.name for page in pages} == MAX_WORDS.keys()
    over = {p.name: words(p) for p in pages if words(p) > MAX_WORDS[p.name]}
    assert over == {}
    research = (ROOT / "docs" / "research").glob("*.md")
    assert sum(map(words, [*pages, *research])) <= 26_000


def test_the_map_is_what_the_script_draws():
    script = runpy.run_path(str(ROOT / "docs" / "make_map.py"))
    drawn = script["draw"](script["boxes_and_imports"]())
    assert script["TARGET"].read_text() == drawn, "run `python docs/make_map.py`"


def test_the_configuration_page_is_generated():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert table() in page, "run `ttlcache config --into docs/configuration.md`"
    told = output_of(app, "config", "--into", str(ROOT / "README.md"), status=1)
    assert "has no table" in told


def test_the_policies_page_names_every_option_and_its_default():
    page = (ROOT / "docs" / "policies.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| `(\w+)` \| `(.*?)` \|", page, re.MULTILINE)
    options = {
        (policy, name, json.dumps(field.default))
        for policy in policies.SHIPPED  # other tests register some of their own
        for name, field in type(
            policies.create(policy, {})
        ).Options.model_fields.items()
    }
    assert len(rows) == len(options)
    assert set(rows) == options


def test_the_clients_page_names_every_rule():
    from ttlcache_connector.http import known_clients

    page = (ROOT / "docs" / "clients.md").read_text().lower()
    objects = [name for form in known_clients.BODY_FORMS for name in form.path]
    members = [name for path in known_clients.BODY_HINTS for name in path]
    headers = [name.decode() for name in HEADER_NAMES]
    told = (*headers, *objects, *members)
    assert [name for name in told if name not in page] == []
