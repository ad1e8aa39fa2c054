"""CuPy on a machine without a device: put this folder's parent first on PYTHONPATH.

One device made of this process's memory (`FakeCuda`: streams run in random order, as
far as events allow), kernels by their own device code. Every call is made on the
installed CuPy first: it has to know the name and take the arguments before it can say
that there is no driver. A deprecation is an error. What is not stood in for raises.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import tests  # of whichever package has the name

_ROOT = Path(__file__).parents[3]
if str(_ROOT / "tests") not in tests.__path__:
    tests.__path__.append(str(_ROOT / "tests"))

from tests.csrc.ptx import DeviceCode  # noqa: E402
from tests.transfer.fake_cuda import FakeCuda, _Op  # noqa: E402
from ttlcache.transfer.cuda import THREADS_PER_CTA, CudaError  # noqa: E402

INVALID_VALUE, NO_HANDLE, NOT_READY, ILLEGAL_ADDRESS = 1, 400, 600, 700
REGISTERED, NOT_REGISTERED, NOT_FOUND = 712, 713, 500
KINDS = TO_DEVICE, TO_HOST, ON_DEVICE, BY_ADDRESS = 1, 2, 3, 4  # cudaMemcpyKind
LOOK_EVERY_S = 50e-6


def _installed() -> ModuleType:
    """The installed CuPy, beside this one."""
    ours, path = sys.modules.pop(__name__), sys.path[:]
    here = Path(__file__).parents[1]
    sys.path[:] = [folder for folder in path if Path(folder).resolve() != here]
    try:
        real = importlib.import_module("cupy")
        importlib.import_module("cupyx.linalg")  # else some day, and from this one
        return real
    finally:
        sys.path[:] = path
        sys.modules[__name__] = ours


def _warn(message: str, category: Any = UserWarning, stacklevel: int = 1) -> None:
    if issubclass(category, DeprecationWarning | FutureWarning):
        raise category(message)
    warnings.warn(message, category, stacklevel + 1)


_real = _installed()
__version__ = _real.__version__
_environment = _real._environment  # by which NVRTC is found
_Error: Any = _real.cuda.runtime.CUDARuntimeError
for _name, _module in list(sys.modules.items()):
    if _name.startswith("cupy.") and "warnings" in vars(_module):
        _module.warnings = SimpleNamespace(**{**vars(warnings), "warn": _warn})
try:
    _real.cuda.runtime.getDeviceCount()
except _Error:
    pass
else:
    raise ImportError("a CUDA driver is here: run without tests/stand_in")

_device = FakeCuda(seed=0)
_device._streams[0] = deque()  # the null stream
_lock = threading.RLock()
_thread = threading.local()


def _ask(real: Callable[..., Any], *args: object, **kwargs: object) -> None:
    """Let the installed CuPy check a call: without a device it can do no more."""
    with contextlib.suppress(_Error):
        real(*args, **kwargs)


def _on_device(function: Callable[..., Any], *args: object) -> Any:
    try:
        with _lock:
            return function(*args)
    except KeyError:
        raise _Error(NO_HANDLE) from None
    except CudaError as error:
        print(f"stand-in: {error}", file=sys.stderr)  # noqa: T201
        raise _Error(ILLEGAL_ADDRESS if _device.broken else INVALID_VALUE) from error


def _until(done: Callable[[], bool]) -> None:
    while not _on_device(done):
        time.sleep(LOOK_EVERY_S)


def _is_empty(stream: int) -> bool:
    _device.progress(8)
    _device._check_broken("synchronize")
    return not _device._streams[stream]


def _is_reached(event: int) -> bool:
    _device.progress(_device._random.randrange(64))
    return _device.is_reached(event)


def _refuse(is_wrong: bool, status: int = INVALID_VALUE) -> None:
    if is_wrong:
        raise _Error(status)


#: Functions of cupy.cuda.runtime; their names and parameters are checked there.
_SHORT: dict[str, Callable[..., Any]] = {
    "getDeviceCount": lambda: 1,
    "streamQuery": lambda stream: 0 if _is_empty(stream) else NOT_READY,
    "streamSynchronize": lambda stream: _until(lambda: _is_empty(stream)),
    "streamWaitEvent": _device.stream_wait,
    "eventDestroy": _device.destroy_event,
    "eventRecord": _device.record,
    "eventSynchronize": lambda event: _until(lambda: _is_reached(event)),
    "eventElapsedTime": lambda start, end: _device.elapsed_s(start, end) * 1e3,
    "malloc": _device.alloc_device,
    "free": lambda ptr: ptr and _device.free_device(ptr),
    "hostAlloc": lambda size, flags: _device.alloc_host(size),
    "freeHost": lambda ptr: ptr and _device.free_host(ptr),
}


class _Runtime:
    """The longer ones."""

    def setDevice(device: int) -> None:
        _refuse(device != 0, 101)

    def deviceGetAttribute(attrib: int, device: int) -> int:
        _refuse(device != 0, 101)
        return {
            _real.cuda.runtime.cudaDevAttrMaxPitch: _device.max_pitch_bytes,
            _real.cuda.runtime.cudaDevAttrCanUseHostPointerForRegisteredMem: 1,
        }[attrib]

    def deviceSynchronize() -> None:
        for stream in list(_device._streams):
            _until(lambda stream=stream: _is_empty(stream))

    def streamCreateWithFlags(flags: int) -> int:
        if flags != 1:
            raise NotImplementedError("a stream that waits for the null stream")
        return _device.create_stream()

    def streamDestroy(stream: int) -> None:
        _until(lambda: _is_empty(stream))
        _on_device(_device.destroy_stream, stream)

    def eventCreateWithFlags(flags: int) -> int:
        _refuse(flags & ~7 != 0)
        return _device.create_event()

    def eventQuery(event: int) -> int:
        try:
            return 0 if _is_reached(event) else NOT_READY
        except CudaError:
            return ILLEGAL_ADDRESS

    def hostRegister(ptr: int, size: int, flags: int) -> None:
        for at, (_, held, kind) in _device._memory.items():
            overlap = at < ptr + size and ptr < at + held
            _refuse(overlap and (at != ptr or kind != "pageable"), REGISTERED)
        if ptr not in _device._memory:
            _device.take_over(ptr, size, "pageable")
        _device.pin(ptr, size)

    def hostUnregister(ptr: int) -> None:
        _refuse(ptr not in _device._memory, NOT_REGISTERED)
        _device.unpin(ptr)
        _device._free(ptr, "pageable")

    def memcpy(dst: int, src: int, size: int, kind: int) -> None:
        _refuse(kind not in KINDS)
        if kind in (TO_DEVICE, ON_DEVICE):
            _device._demand(dst, size)
        if kind in (TO_HOST, ON_DEVICE):
            _device._demand(src, size)
        _device._check_broken("memcpy")
        ctypes.memmove(dst, src, size)

    def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
        _refuse(kind not in KINDS)
        _device.copy_2d(dst, size, src, size, size, 1, stream)

    def memcpy2DAsync(*args: int) -> None:
        *shape, _kind, stream = args
        _device.copy_2d(*shape, stream)

    def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
        def run() -> None:
            _device._demand(ptr, size)
            if not _device.broken:
                ctypes.memset(ptr, value, size)

        _device.enqueue(stream, run)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    real = getattr(_real.cuda.runtime, name)
    waits = name.endswith("Synchronize") or name == "streamDestroy"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _ask(real, *args, **kwargs)
        if waits:  # without the lock: others make it come true
            return function(*args, **kwargs)
        return _on_device(functools.partial(function, *args, **kwargs))

    return call


class Stream:
    """cupy.cuda.Stream, of somebody else's handle."""

    def __init__(self, twin: Any) -> None:
        self._twin, self.ptr = twin, twin.ptr

    @classmethod
    def from_external(cls, obj: object) -> Stream:
        return cls(_real.cuda.Stream.from_external(obj))

    def __enter__(self) -> Stream:
        _thread.streams = [*_current(), self.ptr]
        return self

    def __exit__(self, *_: object) -> None:
        _thread.streams = _current()[:-1]

    def launch_host_func(self, callback: Callable[[Any], object], arg: object) -> None:
        _ask(self._twin.launch_host_func, callback, arg)
        thread = threading.Thread(target=callback, args=(arg,), daemon=True)
        ended = _Op(lambda: None, lambda: not thread.is_alive())
        with _lock:
            _device._streams[self.ptr].extend((_Op(thread.start), ended))


def _current() -> list[int]:
    return getattr(_thread, "streams", [0])


@functools.cache
def _built(code: str, options: tuple[str, ...]) -> DeviceCode:
    return DeviceCode(Path(tempfile.mkdtemp()), code, options)


class RawModule:
    """cupy.RawModule: its kernels' device code on the CPU."""

    def __init__(self, *args: Any, code: str, options: tuple[str, ...] = (), **kw: Any):
        self._twin = _real.RawModule(*args, code=code, options=options, **kw)
        self._code = _built(code, options)

    def get_function(self, name: str) -> Callable[..., None]:
        _ask(self._twin.get_function, name)
        try:
            if not self._code.has(name):
                raise _real.cuda.driver.CUDADriverError(NOT_FOUND)
        except RuntimeError as error:
            words = (str(error), self._code.source, "kernels.cu", self._code.options)
            raise _real.cuda.compiler.CompileException(*words, "nvrtc") from error
        return functools.partial(self._launch, name)

    def _launch(self, name: str, grid: Any, block: Any, args: Any) -> None:
        _refuse(block != (THREADS_PER_CTA,) or len(grid) != 1)
        if not all(isinstance(arg, np.uint64 | np.int64) for arg in args):
            raise TypeError(f"{name} takes 64-bit integers of NumPy: {args}")
        words, stream = tuple(map(int, args)), _current()[-1]
        with _lock:
            _device.run_kernel = self._code.run
            _on_device(_device.launch, name, grid[0], words, stream)


class _Served(ModuleType):
    """Names of the installed module: what stands in, and numbers and exceptions."""

    def __init__(self, real: ModuleType, **names: object) -> None:
        super().__init__(real.__name__)
        self._real = real
        for name, value in names.items():
            getattr(real, name)
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return _pass_on(self._real, name)


def _pass_on(module: ModuleType, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    value = getattr(module, name)
    if isinstance(value, int) or (
        isinstance(value, type) and issubclass(value, Exception)
    ):
        return value
    raise NotImplementedError(f"tests/stand_in has no {module.__name__}.{name}")


def __getattr__(name: str) -> Any:
    return _pass_on(_real, name)


_functions = _SHORT | {n: call for n, call in vars(_Runtime).items() if n[0] != "_"}
runtime = _Served(
    _real.cuda.runtime,
    **{name: _checked(name, call) for name, call in _functions.items()},
)
cuda = _Served(
    _real.cuda,
    runtime=runtime,
    driver=_Served(_real.cuda.driver),
    compiler=_Served(_real.cuda.compiler),
    Stream=Stream,
    ExternalStream=_real.cuda.ExternalStream,
)
for _name in ("runtime", "driver", "compiler"):
    sys.modules[f"cupy.cuda.{_name}"] = getattr(cuda, _name)
sys.modules["cupy.cuda"] = cuda


# The driver: cuMemcpyBatchAsync as of 12.8.

_ARGUMENTS = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] + [ctypes.c_void_p] * 2
_ARGUMENTS += [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]


@ctypes.CFUNCTYPE(ctypes.c_uint, *_ARGUMENTS)
def _memcpy_batch(dst, src, sizes, count, attributes, firsts, num, failed, stream):
    try:
        order = ctypes.c_uint.from_address(attributes).value
        flags = ctypes.c_uint.from_address(attributes + 20).value
        starts_at = ctypes.c_size_t.from_address(firsts).value
        # One kind of copy at most here, never on the null stream.
        if not (count and num == 1 and starts_at == 0 and stream and not flags):
            return INVALID_VALUE
        if order not in (1, 2, 3):
            return INVALID_VALUE
        words = ctypes.c_uint64 * count
        columns = [np.array(words.from_address(at)) for at in (dst, src, sizes)]
        _on_device(_device.copy_batch, *columns, order == 3, stream)
    except _Error as error:
        ctypes.c_size_t.from_address(failed).value = 2**64 - 1
        return error.status
    return 0


class _Driver:
    """libcuda."""

    def cuGetProcAddress_v2(
        self, symbol: bytes, entry: Any, version: int, flags: Any, found: Any
    ) -> int:
        if symbol != b"cuMemcpyBatchAsync" or not 12080 <= version < 13000:
            found._obj.value = 1  # CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
            return NOT_FOUND
        address = ctypes.cast(_memcpy_batch, ctypes.c_void_p).value
        entry._obj.value, found._obj.value = address, 0
        return 0


class _CDLL(ctypes.CDLL):
    def __new__(cls, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return _Driver() if name == "libcuda.so.1" else super().__new__(cls)


ctypes.CDLL = _CDLL
