"""NVRTC through ctypes: compiles CUDA source on machines without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path


def library_path() -> Path | None:
    """libnvrtc of the wheel `nvidia-cuda-nvrtc`, or None."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    found = (
        path
        for folder in folders
        for pattern in ("cu*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*")
        for path in sorted(Path(folder).glob(pattern))
        if ".alt." not in path.name
    )
    return next(found, None)


class Nvrtc:
    """One loaded libnvrtc."""

    def __init__(self, path: Path) -> None:
        # nvrtc opens its builtins by name: they must be loaded before.
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._lib = ctypes.CDLL(str(path))
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(
        self, source: str, options: tuple[str, ...], output: str = "CUBIN"
    ) -> tuple[bytes, str]:
        """Machine code (`CUBIN` or `PTX`) and the compiler's log.

        Raises:
            RuntimeError: the source does not compile; with the log.
        """
        program = ctypes.c_void_p()
        words = (source.encode(), b"copy_runs.cu", 0, None, None)
        self._call("nvrtcCreateProgram", ctypes.byref(program), *words)
        try:
            words = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            status = self._lib.nvrtcCompileProgram(program, len(options), words)
            log = self._text(program, "nvrtcGetProgramLog")
            if status:
                raise RuntimeError(log.decode())
            return self._text(program, f"nvrtcGet{output}"), log.rstrip(b"\0").decode()
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, getter: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(getter + "Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(getter, program, buffer)
        return buffer.raw

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._lib, name)(*args)
        if status:
            raise RuntimeError(f"{name}: {self._lib.nvrtcGetErrorString(status)}")
