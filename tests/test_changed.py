"""The choice of nightly tests by what a commit changes."""

from tests.changed import NIGHTLY, ROOT, touched


def test_a_source_touches_the_tests_that_see_it_at_work():
    assert touched(["README.md", "bench/cli.py"]) == []
    assert touched(["ttlcache/types.py"]) == ["tests/core/test_mutations.py"]
    assert touched(["tests/e2e/test_fleet.py"]) == ["tests/e2e/test_fleet.py"]


def test_every_named_path_is_there():
    named = {path for sources in NIGHTLY.values() for path in sources}
    for path in [*NIGHTLY, *named]:
        assert (ROOT / path).exists(), path


def test_every_nightly_file_is_named():
    """Those that are nightly from their first line to their last."""
    marked = "pytestmark = [pytest.mark.e2e, pytest.mark.nightly]"
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != ROOT / "tests/test_changed.py" and marked in path.read_text()
    }
    assert found <= set(NIGHTLY)
    assert len(found) >= 7
