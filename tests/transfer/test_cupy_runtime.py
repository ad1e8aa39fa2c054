"""What can be known of the CUDA calls without a device: their arguments."""

from __future__ import annotations

import contextlib
import ctypes

import numpy as np
import pytest

from ttlcache.errors import TransferError
from ttlcache.transfer import cupy_runtime
from ttlcache.transfer.cuda import CudaError
from ttlcache.transfer.cupy_runtime import CupyRuntime

cupy = pytest.importorskip("cupy")


def has_device() -> bool:
    try:
        return cupy.cuda.runtime.getDeviceCount() > 0
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


needs_no_device = pytest.mark.skipif(
    has_device(), reason="made-up handles would crash a real device; see tests/gpu"
)


@pytest.fixture
def runtime():
    """Without its constructor, which asks for a device."""
    made = object.__new__(CupyRuntime)
    made._cupy, made._rt, made._device = cupy, cupy.cuda.runtime, 0
    made._errors = (
        cupy.cuda.runtime.CUDARuntimeError,
        cupy.cuda.driver.CUDADriverError,
        cupy.cuda.compiler.CompileException,
    )
    made._batch, made._module, made._kernels = None, None, {}
    return made


@needs_no_device
def test_without_a_device_there_is_no_runtime():
    with pytest.raises(TransferError, match="no CUDA device"):
        CupyRuntime()


@needs_no_device
@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("activate", ()),
        ("create_stream", ()),
        ("destroy_stream", (1 << 40,)),
        ("drain", (1 << 40,)),
        ("create_event", ()),
        ("destroy_event", (1 << 40,)),
        ("record", (1 << 40, 1 << 41)),
        ("stream_wait", (1 << 40, 1 << 41)),
        ("wait", (1 << 40,)),
        ("elapsed_s", (1 << 40, 1 << 41)),
        ("copy_2d", (1 << 40, 64, 1 << 41, 64, 32, 2, 1 << 42)),
        ("copy_2d", (1 << 40, 64, 1 << 41, 64, 64, 1, 1 << 42)),
        ("launch", ("ttlcache_gather", 8, (1 << 40, 3, 4, 4096), 1 << 42)),
        ("alloc_device", (64,)),
        ("free_device", (1 << 40,)),
        ("alloc_host", (64,)),
        ("free_host", (1 << 40,)),
        ("pin", (1 << 40, 4096)),
        ("unpin", (1 << 40,)),
        ("_attribute", ("cudaDevAttrMaxPitch",)),
        ("_attribute", ("cudaDevAttrCanUseHostPointerForRegisteredMem",)),
    ],
)
def test_every_call_gets_as_far_as_cuda(runtime, call, args):
    """CuPy takes the arguments; CUDA says that there is no device."""
    may_do_nothing = ("free_device", "free_host", "destroy_event")
    refused = pytest.raises(CudaError, match=r"cudaError|CUDA")
    with contextlib.suppress(CudaError) if call in may_do_nothing else refused:
        getattr(runtime, call)(*args)


def test_a_batch_reaches_the_driver_as_it_wants_it(runtime):
    seen = {}

    def batch(dst, src, sizes, count, attributes, firsts, num, failed, stream):
        words = ctypes.c_uint64 * count
        for to, start, size in zip(
            words.from_address(dst),
            words.from_address(src),
            words.from_address(sizes),
            strict=True,
        ):
            ctypes.memmove(to, start, size)
        seen["attributes"] = list((ctypes.c_uint32 * 6).from_address(attributes))
        seen["firsts"] = list((ctypes.c_size_t * num).from_address(firsts))
        seen["num"], seen["stream"] = num, stream
        ctypes.c_size_t.from_address(failed).value = 1
        return seen.get("status", 0)

    runtime._batch = cupy_runtime.BATCH_PROTOTYPE(batch)
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    dst = np.array([target.ctypes.data, target.ctypes.data + 50], np.uint64)
    src = np.array([source.ctypes.data + 10, source.ctypes.data], np.uint64)
    size = np.array([7, 5])
    runtime.copy_batch(dst, src, size, stable_source=False, stream=77)
    np.testing.assert_array_equal(target[:8], [*range(10, 17), 0])
    np.testing.assert_array_equal(target[49:56], [0, *range(5), 0])
    # Source order "stream", no location hints, no flags; one entry for all copies.
    assert seen == {
        "attributes": [1, 0, 0, 0, 0, 0],
        "firsts": [0],
        "num": 1,
        "stream": 77,
    }
    runtime.copy_batch(dst, src, size, stable_source=True, stream=77)
    assert seen["attributes"][0] == 3
    seen["status"] = 700
    with pytest.raises(CudaError, match="CUDA error 700 at copy 1 of 2"):
        runtime.copy_batch(dst, src, size, stable_source=True, stream=77)


def test_without_batch_copies_the_call_says_so(runtime):
    empty = np.zeros(0, np.uint64)
    with pytest.raises(CudaError, match="lacks it"):
        runtime.copy_batch(empty, empty, empty.astype(np.int64), False, 1)


@needs_no_device
def test_without_a_driver_there_is_no_entry():
    assert cupy_runtime._batch_entry() is None
