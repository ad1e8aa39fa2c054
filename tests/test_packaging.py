"""What `pip install ttlcache` would install."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.bench.samples import recorded, write_trace
from tests.commands import output_of
from ttlcache.cli.main import app
from ttlcache.transfer.cuda import source_path
from ttlcache_lmcache import compat

ROOT = Path(__file__).parents[1]
PACKAGES = {"ttlcache_connector", "ttlcache_lmcache", "ttlcache_sim"}
MINORS = [f"0.{minor}.0" for minor in range(200)]


def build(target: str, source: Path, folder: Path) -> Path:
    """The wheel or sdist made of a tree."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d"]
    subprocess.run([*command, str(folder)], cwd=source, check=True)
    (built,) = folder.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[target])
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """Where the wheel's files would be."""
    folder = wheel.parent
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_core_connector_command_and_plugin(site):
    assert (site / "ttlcache/cli/__init__.py").exists()
    assert (site / "ttlcache_connector/http/middleware.py").exists()
    assert not {"bench", "tests"} & {path.name for path in site.iterdir()}
    (declared,) = site.glob("*.dist-info/entry_points.txt")
    assert "ttlcache = ttlcache.cli.main:app" in declared.read_text()
    assert "ttlcache = ttlcache_connector.plugin:register" in declared.read_text()
    for package in ("ttlcache", *PACKAGES):
        assert (site / package / "py.typed").exists()


_ESTIMATE = """
import sys
sys.modules['bench'] = None
import ttlcache_sim
from ttlcache.cli.main import app
print(ttlcache_sim.__file__)
app(['estimate', 'log.jsonl'])
"""


def test_the_wheel_estimates_without_the_benches(site, tmp_path):
    """It has all of the simulator, which imports no bench (lint-imports)."""
    source = ROOT / "connector"
    modules = [*(source / "ttlcache_sim").rglob("*.py")]
    assert len(modules) > 30
    assert all((site / path.relative_to(source)).exists() for path in modules)
    write_trace(tmp_path / "log.jsonl", recorded({}))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ESTIMATE],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    file, told, *_ = done.stdout.splitlines()
    assert Path(file).is_relative_to(site)
    assert told == "It will not help: every program of these logs has one turn."


def test_the_sdist_has_what_the_wheel_is_made_of_and_nothing_else(wheel, tmp_path):
    sdist = build("sdist", ROOT, tmp_path)
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("ttlcache-*/")
    assert {path.name for path in source.iterdir()} == {
        *("ttlcache", "connector", "csrc", "pyproject.toml", "PKG-INFO", ".gitignore"),
        *("README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE"),
    }
    packages = {path.name for path in (source / "connector").iterdir()}
    assert packages == PACKAGES
    again = build("wheel", source, tmp_path / "again")
    assert again.read_bytes() == wheel.read_bytes()


def test_the_command_says_its_version():
    installed = importlib.metadata.version("ttlcache")
    assert output_of(app, "--version") == f"ttlcache {installed}\n"


def test_an_installed_package_finds_the_kernels(site):
    code = "from ttlcache.transfer.cuda import source_path; print(source_path())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=site.parent,
        env={"PYTHONPATH": str(site)},
        check=True,
        capture_output=True,
        text=True,
    )
    found = Path(done.stdout.strip())
    assert found.is_relative_to(site)
    assert found.read_text() == source_path().read_text()


def test_the_extras_ask_for_what_the_server_takes():
    """pip takes the newest version that an extra allows."""
    requirements = pytest.importorskip("ttlcache_connector.engine.requirements")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (vllm,) = (Requirement(line).specifier for line in extras["vllm"])
    tested = SpecifierSet(requirements.TESTED_VLLM)
    allowed = [v for v in MINORS if v in vllm]
    assert allowed == [v for v in MINORS if v in tested][: len(allowed)]
    assert "1.0.0" not in vllm
    assert "0.32.0" in vllm  # what CI runs on
    assert extras["lmcache"][0] == f"lmcache{compat.TESTED_LMCACHE}"
