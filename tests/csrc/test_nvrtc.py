"""Every kernel compiles for the GPUs that we name, without one."""

from __future__ import annotations

import pytest

from tests.csrc.nvrtc import Nvrtc, library_path
from ttlcache.transfer.cuda import KERNELS, NVRTC_OPTIONS, source_path


@pytest.fixture(scope="module")
def nvrtc():
    path = library_path()
    if path is None:
        pytest.skip("no libnvrtc: pip install nvidia-cuda-nvrtc (in the dev extra)")
    return Nvrtc(path)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_kernel_compiles(nvrtc, arch):
    assert arch in nvrtc.architectures()
    options = (*NVRTC_OPTIONS, f"--gpu-architecture=sm_{arch}", "-Werror=all-warnings")
    cubin, log = nvrtc.compile(source_path().read_text(), options)
    assert log.strip("\0 \n") == ""
    assert cubin[:4] == b"\x7fELF"
    for name in KERNELS.values():
        assert f".text.{name}".encode() in cubin


def test_a_broken_source_is_refused(nvrtc):
    source = source_path().read_text().replace("i64 row =", "i64 row + =")
    with pytest.raises(RuntimeError, match="error"):
        nvrtc.compile(source, (*NVRTC_OPTIONS, "--gpu-architecture=sm_90"))
