"""What `pip install ttlcache` would install."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ttlcache.transfer.cuda import source_path
from ttlcache_lmcache import compat

ROOT = Path(__file__).parents[1]
MINORS = [f"0.{minor}.0" for minor in range(200)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where the wheel's files would be."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d"]
    subprocess.run([*command, str(folder)], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_core_connector_command_and_plugin(site):
    assert (site / "ttlcache/cli/__init__.py").exists()
    assert (site / "ttlcache_connector/http/middleware.py").exists()
    assert not {"bench", "tests"} & {path.name for path in site.iterdir()}
    (declared,) = site.glob("*.dist-info/entry_points.txt")
    assert "ttlcache = ttlcache.cli:app" in declared.read_text()
    assert "ttlcache = ttlcache_connector.plugin:register" in declared.read_text()


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
