"""The runner of LMCache's tests, on tests of our own in a place like LMCache's."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("lmcache", reason="LMCache is an extra")

from bench.lmcache.upstream_tests.chosen import reason_not_to_run
from bench.lmcache.upstream_tests.run import UpstreamOptions, lmcache_tests

TESTS = """
from lmcache.v1.distributed.l2_adapters.mock_l2_adapter import (
    MockL2Adapter, MockL2AdapterConfig,
)

def test_with_ours():
    adapter = MockL2Adapter(MockL2AdapterConfig(0.001, 10.0))
    assert adapter.report_status()["is_healthy"]
    assert adapter.debug_get_stored_object_count() == 0
    adapter.close()

def test_without():
    assert MockL2AdapterConfig is not None

def test_that_fails():
    assert {ok}
"""


def run(folder: Path, ok: bool) -> tuple[int, str]:
    place = folder / "tests" / "v1" / "distributed"
    place.mkdir(parents=True)
    for each in (place, place.parent, place.parent.parent):
        (each / "__init__.py").touch()
    text = TESTS.replace("{ok}", str(ok))
    (place / "test_mock_l2_adapter.py").write_text(text)
    (folder / "PKG-INFO").write_text("Name: lmcache\nVersion: 9.8.7\n")
    out = io.StringIO()
    status = lmcache_tests(UpstreamOptions(folder), Console(file=out, width=200))
    return status, out.getvalue()


@pytest.mark.nightly
def test_what_ran_and_what_did_not(tmp_path: Path) -> None:
    status, text = run(tmp_path / "good", ok=True)
    assert status == 0
    assert "version 9.8.7" in text
    (row,) = (line for line in text.splitlines() if "test_mock_l2" in line)
    cells = [cell.strip() for cell in row.split("│")[2:-1]]
    assert cells == ["1", "", "", "", "2"]  # ours; elsewhere
    status, text = run(tmp_path / "bad", ok=False)
    assert status == 1
    assert "failed: distributed/test_mock_l2_adapter.py test_that_fails" in text


def test_a_folder_without_tests_is_named(tmp_path: Path) -> None:
    out = io.StringIO()
    assert lmcache_tests(UpstreamOptions(tmp_path), Console(file=out)) == 2
    assert "no tests/v1" in out.getvalue()


def test_reasons_are_for_one_test_of_one_file() -> None:
    path = "tests/v1/storage_backend/test_local_disk_backend.py"
    assert reason_not_to_run(f"{path}::TestLocalDiskBackend::test_str")
    assert reason_not_to_run(f"{path}::TestX::test_str[a]")
    assert reason_not_to_run(f"{path}::TestBatched::test_empty_keys_list") is None
    assert reason_not_to_run("tests/v1/other.py::test_str") is None
