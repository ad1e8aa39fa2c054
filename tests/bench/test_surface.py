"""Other versions of vLLM: where names are looked for, and a wheel laid over kernels."""

from __future__ import annotations

import json
import zipfile

import pytest

from bench.surface import overlay, vllm_moved


def places(monkeypatch, *modules):
    monkeypatch.setattr(vllm_moved, "_MODULES", {"dumps": modules})


@pytest.mark.parametrize("gone", ["no_such_package.deep.inside", "json.no_such_part"])
def test_a_module_or_a_whole_package_may_be_gone(monkeypatch, gone):
    places(monkeypatch, gone, "math", "json")
    assert vllm_moved.find("dumps") is json.dumps


def test_a_module_that_lacks_what_it_imports_is_no_older_version(monkeypatch, tmp_path):
    (tmp_path / "broken_here.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    places(monkeypatch, "broken_here", "json")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        vllm_moved.find("dumps")


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "vllm-0.99.0.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "__version__ = '0.99.0'\n")
        archive.writestr("vllm/_C.abi3.so", "for CUDA")
        archive.writestr(
            "vllm-0.99.0.dist-info/METADATA",
            "Metadata-Version: 2.4\nName: vllm\nVersion: 0.99.0\nSummary: x\n",
        )
    return path


def test_python_is_the_wheels_and_kernels_are_the_cpu_builds(
    wheel, tmp_path, monkeypatch
):
    cpu = tmp_path / "cpu" / "vllm"
    (cpu / "sub").mkdir(parents=True)
    (cpu / "__init__.py").write_text("__version__ = '0.98.0'\n")
    (cpu / "_C.abi3.so").write_text("for CPUs")
    (cpu / "sub" / "more.so").write_text("for CPUs, too")
    monkeypatch.setattr(overlay, "_installed", lambda: cpu)
    folder = tmp_path / "out"
    overlay.overlay(wheel, folder)
    assert "0.99.0" in (folder / "vllm/__init__.py").read_text()
    assert (folder / "vllm/_C.abi3.so").read_text() == "for CPUs"
    assert (folder / "vllm/sub/more.so").read_text() == "for CPUs, too"
    (metadata,) = folder.glob("*.dist-info/METADATA")
    assert "\nVersion: 0.99.0+cpu\nSummary" in metadata.read_text()
    (folder / "left.py").touch()
    overlay.overlay(wheel, folder)
    assert not (folder / "left.py").exists(), "of an older overlay"
