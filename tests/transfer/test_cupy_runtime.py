"""What can be known of the CUDA calls without a device: their arguments."""

import contextlib
import ctypes

import numpy as np
import pytest

from ttlcache.errors import TransferError
from ttlcache.transfer import cupy_runtime
from ttlcache.transfer.cuda import CudaError
from ttlcache.transfer.cupy_runtime import CupyRuntime

cupy = pytest.importorskip("cupy")
ERRORS = (
    cupy.cuda.runtime.CUDARuntimeError,
    cupy.cuda.driver.CUDADriverError,
    cupy.cuda.compiler.CompileException,
)


def has_device():
    try:
        return cupy.cuda.runtime.getDeviceCount() > 0
    except ERRORS:
        return False


pytestmark = pytest.mark.skipif(
    has_device(), reason="made-up handles would crash a real device; see tests/gpu"
)
STREAM = 1 << 42


@pytest.fixture
def runtime():
    """Without its constructor, which asks for a device."""
    made = object.__new__(CupyRuntime)
    made._cupy, made._rt, made._device = cupy, cupy.cuda.runtime, 0
    made._batch, made._module, made._kernels = None, None, {}
    made._errors = ERRORS
    return made


def test_without_a_device_there_is_no_runtime_and_no_batch_copy(runtime):
    with pytest.raises(TransferError, match="no CUDA device"):
        CupyRuntime()
    assert cupy_runtime._batch_entry() is None
    empty = np.zeros(0, np.uint64)
    with pytest.raises(CudaError, match="lacks it"):
        runtime.copy_batch(empty, empty, empty.astype(np.int64), False, 1)


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("activate", ()),
        ("create_stream", ()),
        ("destroy_stream", (STREAM,)),
        ("drain", (STREAM,)),
        ("create_event", ()),
        ("destroy_event", (1 << 40,)),
        ("record", (1 << 40, STREAM)),
        ("stream_wait", (STREAM, 1 << 40)),
        ("wait", (1 << 40,)),
        ("elapsed_s", (1 << 40, 1 << 41)),
        ("copy_2d", (1 << 40, 64, 1 << 41, 64, 32, 2, STREAM)),
        ("copy_2d", (1 << 40, 64, 1 << 41, 64, 64, 1, STREAM)),
        ("launch", ("ttlcache_gather", 8, (1 << 40, 3, 4, 4096), STREAM)),
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


def test_a_batch_that_fails_names_its_copy(runtime):
    """What it hands to the driver is looked at by tests/stand_in."""
    statuses = [0, 700]

    def batch(*args):
        ctypes.c_size_t.from_address(args[7]).value = 1
        return statuses.pop(0)

    runtime._batch = cupy_runtime.BATCH_PROTOTYPE(batch)
    addresses = np.array([1 << 40, 1 << 41], np.uint64)
    copies = addresses, addresses, np.array([7, 5])
    runtime.copy_batch(*copies, stable_source=False, stream=77)
    with pytest.raises(CudaError, match="CUDA error 700 at copy 1 of 2"):
        runtime.copy_batch(*copies, stable_source=True, stream=77)
