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

ROOT = Path(__file__).parents[1]
MINORS = [f"0.{minor}.0" for minor in range(200)]


def test_the_wheel_has_core_connector_command_and_plugin(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "-t",
            "wheel",
            "-d",
            str(tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        points = next(name for name in names if name.endswith("entry_points.txt"))
        declared = wheel.read(points).decode()
    assert {
        "ttlcache/cli/__init__.py",
        "ttlcache_connector/http/middleware.py",
    } <= names
    assert not any(name.startswith(("bench/", "tests/")) for name in names)
    assert "ttlcache = ttlcache.cli:app" in declared
    assert "ttlcache = ttlcache_connector.plugin:register" in declared


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
    assert extras["lmcache"][0] == f"lmcache{requirements.TESTED_LMCACHE}"
