"""Every command in README and docs is run: here, in tests/e2e, or as said below."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.cli import app as bench_app
from bench.sim.rivals.arms import parse_arms
from tests.documented import (
    PAGES,
    ROOT,
    commands,
    of_benches,
    of_doctors,
    of_fleets,
    of_recordings,
    of_servers,
)
from ttlcache import policies
from ttlcache.cli import app
from ttlcache.cli.config import table
from ttlcache.config import TTLCacheConfig, load_config
from ttlcache.telemetry.events import Telemetry
from ttlcache.telemetry.recorder import Recorder
from ttlcache.testing.fake_engine import FakeEngine

#: First word of a command -> where it is run.
RUN_ELSEWHERE = {
    "make": "tests/test_readme.py",
    "vllm": "tests/test_readme.py checks the flag, tests/e2e serves with it",
    "pip": "tests/test_packaging.py builds what it would install",
    "lmcache": "tests/lmcache checks the flags, tests/e2e serves with them",
    "docker": "tests/test_deploy.py checks what it would build and start",
    "kubectl": "tests/test_deploy.py checks what it would apply",
    "export": "a client's own setting",
    "python": "parsed here; tests/bench runs the benches, smaller",
    "PIP_EXTRA_INDEX_URL=ADDRESS_OF_THE_CPU_INDEX": "a pip setting before make demo",
}
TIERS = [c for c in commands() if c.words[:2] == ["ttlcache", "serve-tiers"]]
PROFILE = [c for c in commands() if c.words[:2] == ["ttlcache", "profile"]]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A recording of a program called job-17."""
    place = tmp_path / "recording"
    engine = FakeEngine(
        {"policy": "fixed"},
        telemetry=Telemetry(recorder=Recorder(place, {}, run="1-1")),
    )
    context = engine.turn("r1", list(range(20)), [50], program="job-17")
    engine.step(seconds=1.0)
    engine.turn("r2", [*context, 1], [51], program="job-17", is_last_step=True)
    engine.controller.telemetry.close()
    return place


@pytest.mark.parametrize("command", of_recordings(), ids=lambda c: c.text)
def test_commands_on_a_recording(command, recording, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    replaced = {"/var/log/ttlcache": str(recording), "PROGRAM": "job-17"}
    words = [replaced.get(word, word) for word in command.words[1:]]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", TIERS, ids=lambda c: c.text)
def test_commands_that_start_tiers(command):
    result = CliRunner().invoke(app, [*command.words[1:], "--print-only"])
    assert result.exit_code == 0, result.output
    assert "vllm serve" in result.output


@pytest.mark.parametrize("command", of_doctors(), ids=lambda c: c.text)
def test_commands_that_ask_the_doctor(command, tmp_path, monkeypatch):
    pytest.importorskip("lmcache", reason="LMCache is an extra")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / command.page).read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    here = str(tmp_path / "kv")
    (tmp_path / "lmcache.yaml").write_text(example.replace("/nvme/kv", here))
    words = [word.replace("/nvme/kv", here) for word in command.words[1:]]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    for plugin in ("server module", "L2 adapter", "storage plugin"):
        assert plugin in result.output
    assert not (tmp_path / "kv").exists(), "the doctor made a folder"


@pytest.mark.parametrize("command", of_benches(), ids=lambda c: c.text)
def test_commands_of_benches_are_accepted(command, tmp_path):
    """They take minutes to hours: names, options, values and arms are checked."""
    name, *words = command.words
    bench = typer.main.get_command(bench_app).commands[name]
    if not words:
        return  # names the command, which exists
    words = [
        str(tmp_path) if word in ("DIR", "TRACE…", "LOGS…") else word for word in words
    ]
    context = bench.make_context(name, words)
    if name == "sim" and "my_arm.py" not in command.text:
        assert parse_arms(context.params["arms"])


def test_no_command_is_left_out():
    assert len(of_benches()) >= 25
    live = [*of_servers(), *PROFILE]
    # tests/front/test_documented.py runs those of fleets.
    live += of_fleets()
    run_here = {c.text for c in [*of_recordings(), *of_doctors(), *TIERS, *live]}
    assert len(of_doctors()) >= 4
    for command in commands():
        elsewhere = command.words[0] in RUN_ELSEWHERE
        assert elsewhere or command.text in run_here, command
    assert len(of_recordings()) >= 4
    assert len(of_servers()) >= 6


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
    "README.md": 1300,
    "CHANGELOG.md": 500,
    "clients.md": 700,
    "configuration.md": 1200,
    "design.md": 1500,
    "estimate.md": 250,
    "fleet.md": 950,
    "lmcache.md": 1000,
    "operations.md": 1600,
    "policies.md": 900,
    "scheduling.md": 800,
    "tiers.md": 1050,
    # For reference: a table with a row an option, and what `bench figures` writes.
    "vllm-options.md": 1300,
    "bench.md": 7000,
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


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "research").glob("*.md")), ids=lambda p: p.name
)
def test_research_is_dated(page):
    """Below its title: how it came about, and of which commit the numbers are."""
    head = page.read_text().split("\n\n")[1]
    assert head.startswith("How it came about; ")
    assert re.search(r"commit [0-9a-f]{7} \(\d{4}-\d\d-\d\d\)", " ".join(head.split()))


def test_design_names_files_that_exist():
    text = (ROOT / "docs" / "design.md").read_text()
    named = re.findall(r"`((?:ttlcache|connector|bench|docs)/[\w./]+)`", text)
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_map_is_what_the_script_draws():
    script = runpy.run_path(str(ROOT / "docs" / "make_map.py"))
    drawn = script["draw"](script["boxes_and_imports"]())
    assert script["TARGET"].read_text() == drawn, "run `python docs/make_map.py`"


def test_the_configuration_page_is_generated():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert table() in page, "run `ttlcache config --into docs/configuration.md`"
    for name in TTLCacheConfig.model_fields:
        assert f"| `{name}` |" in page
    example = re.search(r"kv_connector_extra_config\":(\{.*?\})\}'", page)[1]
    load_config(json.loads(example))


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
    from ttlcache_connector.http.identity import STRONG_HEADERS

    page = (ROOT / "docs" / "clients.md").read_text().lower()
    for header in STRONG_HEADERS:
        assert header.decode() in page
