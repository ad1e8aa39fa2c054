"""`python -m bench.surface.overlay --help`: a CUDA wheel of vLLM, for CPUs.

For a release of which there is no CPU build yet: its Python, with the kernels of the
CPU build that is installed, its torch and whatever else it needs. What the scheduler
and the connectors do is the release's own; what a model computes is not. Put FOLDER
first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import zipfile
from pathlib import Path


def overlay(wheel: Path, folder: Path) -> None:
    """
    Raises:
        FileNotFoundError: no vLLM is installed to take kernels from.
        FileExistsError: the folder is something else than an older overlay.
        ValueError: the wheel does not say its version.
    """
    installed = _installed()
    if folder.exists():
        if not any(folder.glob("vllm-*.dist-info")):
            raise FileExistsError(f"{folder} is there, and is no overlay of vLLM")
        shutil.rmtree(folder)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so")]
        archive.extractall(folder, names)
    if (server := folder / "vllm" / "vllm-rs").exists():  # extracted without its modes
        server.chmod(0o755)
    for kernels in installed.rglob("*.so"):
        into = folder / "vllm" / kernels.relative_to(installed)
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(kernels, into)
    (metadata,) = folder.glob("vllm-*.dist-info/METADATA")
    metadata.write_text(_as_cpu_build(metadata.read_text()))


def _installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("vllm is not installed")
    return Path(spec.origin).parent


def _as_cpu_build(metadata: str) -> str:
    """vLLM takes its platform from the local part of its version."""
    head, found, rest = metadata.partition("\nVersion: ")
    version, newline, rest = rest.partition("\n")
    if not found:
        raise ValueError("the wheel's metadata names no version")
    return f"{head}{found}{version.partition('+')[0]}+cpu{newline}{rest}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    told = parser.parse_args()
    overlay(told.wheel, told.into)
