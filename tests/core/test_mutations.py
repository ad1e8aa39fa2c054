"""Do the tests notice? Chosen lines are broken one at a time, each in a copy.

Every mutation names the test that must fail for it. The copy holds the package and
its tests; `conftest.py` in it makes sure that it, not this checkout, is imported.
Each takes some seconds: they are tried at night.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.documented import ROOT

TESTS_FAILED = 1  # exit statuses of pytest; broken imports have others
ALL_PASSED = 0

CONFTEST = """
from pathlib import Path
import ttlcache

here = Path(__file__).parent
assert Path(ttlcache.__file__).is_relative_to(here), f"imported {ttlcache.__file__}"
"""


@dataclass(frozen=True)
class Mutation:
    """Replace `original` in `file` of the package: `caught_by` in tests/core fail."""

    file: str
    caught_by: tuple[str, ...]
    original: str
    mutated: str

    def __str__(self):
        return f"{self.file}: {self.mutated.strip().splitlines()[0].strip()}"


def mutations_of(text):
    """`=== file tests …`, then what goes as lines with -, what comes with +."""
    for block in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]:
        head, *lines = block.splitlines()
        file, *caught_by = head.split()
        sides = [
            "\n".join(line[1:] for line in lines if line.startswith(sign))
            for sign in "-+"
        ]
        yield Mutation(file, tuple(caught_by), *sides)


MUTATIONS = [*mutations_of(Path(__file__).with_name("mutations.txt").read_text())]


def make_copy(folder):
    """The package and its tests, with a guard on what is imported."""
    ignore = shutil.ignore_patterns("__pycache__", "test_mutations.py")
    shutil.copytree(ROOT / "ttlcache", folder / "ttlcache", ignore=ignore)
    shutil.copytree(ROOT / "tests/core", folder / "tests/core", ignore=ignore)
    for helper in ("curves.py", "labels.py", "fake_engine.py", "fake_holder.py"):
        shutil.copy(ROOT / "tests" / helper, folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "conftest.py").write_text(CONFTEST)
    return folder


def run_tests(folder, tests):
    """Exit status and end of the output of pytest inside the copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"tests/core/{test}" for test in tests)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]


def test_every_snippet_is_in_its_file_once():
    assert len(MUTATIONS) > 60
    for mutation in MUTATIONS:
        text = (ROOT / "ttlcache" / mutation.file).read_text()
        assert text.count(mutation.original) == 1, f"update the list: {mutation}"
        assert mutation.original != mutation.mutated
        assert mutation.caught_by


@pytest.mark.nightly
def test_unchanged_the_copy_passes(tmp_path):
    tests = sorted({test for mutation in MUTATIONS for test in mutation.caught_by})
    status, output = run_tests(make_copy(tmp_path), tests)
    assert status == ALL_PASSED, output


@pytest.mark.nightly
def test_a_copy_without_the_package_is_refused(tmp_path):
    # Then the editable install would be imported, and the mutation tested nowhere.
    shutil.rmtree(make_copy(tmp_path) / "ttlcache")
    status, output = run_tests(tmp_path, ["test_estimators.py"])
    assert status not in (ALL_PASSED, TESTS_FAILED)
    assert "imported" in output


@pytest.mark.nightly
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_mutation_is_caught(mutation, tmp_path):
    folder = make_copy(tmp_path / "copy")
    source = folder / "ttlcache" / mutation.file
    text = source.read_text()
    source.write_text(text.replace(mutation.original, mutation.mutated))
    status, output = run_tests(folder, mutation.caught_by)
    shutil.rmtree(folder)
    assert status == TESTS_FAILED, f"survived: {mutation}\n{output}"
