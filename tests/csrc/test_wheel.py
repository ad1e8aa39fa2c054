"""The kernels' source travels inside the wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from ttlcache.transfer.cuda import source_path

ROOT = Path(__file__).parents[2]


def test_an_installed_package_finds_the_kernels(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d"]
    subprocess.run([*command, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "site")
    code = "from ttlcache.transfer.cuda import source_path; print(source_path())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        check=True,
        capture_output=True,
        text=True,
    )
    found = Path(done.stdout.strip())
    assert found.is_relative_to(tmp_path / "site")
    assert found.read_text() == source_path().read_text()
