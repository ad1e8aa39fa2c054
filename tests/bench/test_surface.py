"""Other versions of vLLM: where names are looked for, and a wheel laid over kernels."""

import zipfile

import pytest

from bench.surface import overlay


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
