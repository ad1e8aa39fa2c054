"""Runs the device code on the CPU: NVRTC's PTX, translated to C, thread by thread.

Accesses that a device would fault on are errors: misaligned ones and those outside
the memory that the caller names. An instruction that is not known here raises.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ttlcache.transfer.cuda import (
    NVRTC_OPTIONS,
    THREADS_PER_CTA,
    CudaError,
    source_path,
)

COMPILERS = ("gcc", "clang", "cc")
ARCHITECTURE = 80
WIDTHS = (1, 2, 4, 8, 16)
FAULTS = ("", "misaligned", "outside live memory", "division by zero", "endless loop")
MAX_JUMPS = 1 << 22  # of one thread

PRELUDE = """
#include <stdint.h>
typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64;
typedef int8_t s8; typedef int16_t s16; typedef int32_t s32; typedef int64_t s64;
typedef __int128 s128; typedef unsigned __int128 u128;
typedef struct {
    u64 fault, address, width, stored[5], count, last;
    const u64 (*live)[2];  /* sorted: first byte, first byte after */
} Memory;
static int is_live(Memory* m, u64 at, u64 width) {
    u64 low = 0, high = m->count;
    const u64* last = m->live[m->last];
    if (high && at >= last[0] && at + width <= last[1]) return 1;
    while (low < high) {
        u64 middle = (low + high) / 2;
        if (m->live[middle][0] <= at) low = middle + 1; else high = middle;
    }
    if (low) m->last = low - 1;
    return low && at + width <= m->live[low - 1][1];
}
#define FAULT(kind, at, size) \\
    do { m->fault = kind; m->address = at; m->width = size; return 1; } while (0)
#define CHECK(at, size) \\
    do { if ((at) % (size)) FAULT(1, at, size); \\
         if (!is_live(m, at, size)) FAULT(2, at, size); } while (0)
#define DIVIDES(by) do { if ((by) == 0) FAULT(3, 0, 0); } while (0)
#define JUMP(label) do { if (++jumps > %d) FAULT(4, 0, 0); goto label; } while (0)
""".replace("%d", str(MAX_JUMPS))

RUN_GRID = """
int NAME(Memory* m, const u64* params, u32 from, u32 to, u32 nctaid_x, u32 ntid_x) {
    for (u32 cta = from; cta < to; ++cta)
        for (u32 tid = 0; tid < ntid_x; ++tid)
            if (NAME_thread(m, params, cta, tid, nctaid_x, ntid_x)) return 1;
    return 0;
}
"""

SPECIAL = {
    f"%{name}.{axis}": f"{name}_x" if axis == "x" else str(int(name[0] == "n"))
    for name in ("ctaid", "tid", "nctaid", "ntid")
    for axis in "xyz"
}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARE |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
BINARY = {"add": "+", "sub": "-", "mul.lo": "*", "and": "&", "or": "|", "xor": "^"}
TYPES = {f"{kind}{n}": f"{kind}{n}" for kind in "us" for n in (8, 16, 32, 64)}
TYPES |= {f"b{n}": f"u{n}" for n in (8, 16, 32, 64)} | {"pred": "u8"}
REGISTERS = re.compile(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>;")
ENTRY = re.compile(r"\.entry (\w+)\((.*?)\)(.*?)\{(.*?)^\}", re.S | re.M)
GUARD = re.compile(r"@(!?)(%p\d+)\s+(.*)")
ADDRESS = re.compile(r"\[%(\w+)(?:\+(-?\d+))?\]")
ACCESS = re.compile(r"(ld|st)(?:\.global)?(?:\.c[sg])?(?:\.v(2))?\.([bus]\d+)")


class UnknownPtx(Exception):
    """The translator does not know this text."""


class DeviceFault(CudaError):
    """What makes a device stop."""


def translate(ptx: str) -> str:
    """C of every kernel.

    Raises:
        UnknownPtx: with the line.
    """
    text = re.sub(r"//.*", "", ptx)
    kernels = [
        _kernel(name, re.findall(r"\.param \.u64 (\w+)", params), body)
        for name, params, _, body in ENTRY.findall(text)
    ]
    if len(kernels) != text.count(".entry") or ".func" in text:
        raise UnknownPtx("functions, or kernels that are not like ours")
    return PRELUDE + "".join(kernels)


def _kernel(name: str, params: list[str], body: str) -> str:
    lines = [
        f"static int {name}_thread(Memory* m, const u64* params, u32 ctaid_x,"
        " u32 tid_x, u32 nctaid_x, u32 ntid_x) {",
        "u64 jumps = 0;",
    ]
    for line in filter(None, map(str.strip, body.splitlines())):
        if registers := REGISTERS.fullmatch(line):
            kind, prefix, count = registers.groups()
            names = ", ".join(f"{prefix}{i} = 0x5A" for i in range(int(count)))
            lines.append(f"{TYPES[kind]} {names};")
        elif line.endswith(":"):
            lines.append(f"{_label(line[:-1])}: ;")
        elif line.endswith(";"):
            lines.append(_guarded(line[:-1], params))
        else:
            raise UnknownPtx(line)
    return "\n".join([*lines, "}", RUN_GRID.replace("NAME", name)])


def _guarded(line: str, params: list[str]) -> str:
    if guard := GUARD.fullmatch(line):
        negated, predicate, line = guard.groups()
        return f"if ({negated}{predicate[1:]}) {{ {_statement(line, params)} }}"
    return _statement(line, params)


def _statement(line: str, params: list[str]) -> str:
    op, _, rest = line.partition(" ")
    args = [arg.strip() for arg in re.split(r",(?![^{]*\})", rest)] if rest else []
    if op in ("ret", "exit"):
        return "return 0;"
    if op in ("bra", "bra.uni"):
        return f"JUMP({_label(args[0])});"
    if op == "ld.param.u64":
        return f"{args[0][1:]} = params[{params.index(args[1][1:-1])}];"
    if access := ACCESS.fullmatch(op):
        return _access(*access.groups(), args)
    base, _, kind = op.rpartition(".")
    if kind not in TYPES:
        raise UnknownPtx(line)
    target, values = args[0][1:], [_value(arg, TYPES[kind]) for arg in args[1:]]
    return f"{target} = {_result(base, TYPES[kind], values, line)};"


def _result(base: str, kind: str, v: list[str], line: str) -> str:
    bits = int(kind[1:])
    if base in BINARY:
        # In unsigned arithmetic: a device wraps.
        return f"(u{bits})((u{bits}){v[0]} {BINARY[base]} (u{bits}){v[1]})"
    if base == "mad.lo":
        return f"(u{bits}){v[0]} * (u{bits}){v[1]} + (u{bits}){v[2]}"
    if base in ("div", "rem"):
        sign = "/" if base == "div" else "%"
        return f"({{ DIVIDES({v[1]}); {v[0]} {sign} {v[1]}; }})"
    if base in ("min", "max"):
        return f"{v[0]} {'<' if base == 'min' else '>'} {v[1]} ? {v[0]} : {v[1]}"
    if base in ("shl", "shr"):
        past = f"({v[0]} < 0 ? -1 : 0)" if kind[0] == "s" else "0"
        by, sign = f"(u32){v[1]}", "<<" if base == "shl" else ">>"
        return f"{by} >= {bits} ? {past} : {v[0]} {sign} ({by} & {bits - 1})"
    if base in ("mul.wide", "mul.hi"):
        wide = f"({kind[0]}{2 * bits}){v[0]} * ({kind[0]}{2 * bits}){v[1]}"
        return f"({wide}) >> {bits}" if base == "mul.hi" else wide
    if base == "selp":
        return f"{v[2]} ? {v[0]} : {v[1]}"
    if base == "not":
        return f"!{v[0]}" if line.startswith("not.pred") else f"~{v[0]}"
    if base in ("mov", "cvta.to.global"):
        return v[0]
    if base.startswith("cvt.") and base[4:] in TYPES:
        return f"({TYPES[base[4:]]}){v[0]}"
    if base.startswith("setp.") and base[5:] in COMPARE:
        return f"{v[0]} {COMPARE[base[5:]]} {v[1]}"
    raise UnknownPtx(line)


def _access(op: str, vector: str, kind: str, args: list[str]) -> str:
    place, held = (args[1], args[0]) if op == "ld" else (args[0], args[1])
    if not (found := ADDRESS.fullmatch(place)):
        raise UnknownPtx(place)
    names = [name.strip()[1:] for name in held.strip("{}").split(",")]
    item = int(kind[1:]) // 8
    width = item * int(vector or 1)
    at = f"u64 at = {found[1]} + {int(found[2] or 0)}LL; CHECK(at, {width}ull);"
    done = [f"m->stored[{WIDTHS.index(width)}] += {width};"] if op == "st" else []
    for place_in, name in enumerate(names):
        memory = f"*({TYPES[kind]}*)(at + {place_in * item})"
        done.append(f"{name} = {memory};" if op == "ld" else f"{memory} = {name};")
    return f"{{ {at} {' '.join(done)} }}"


def _value(text: str, kind: str) -> str:
    if text.startswith("%"):
        return f"(({kind}){SPECIAL.get(text, text[1:])})"
    if not re.fullmatch(r"-?(\d+|0x[0-9a-fA-F]+)", text):
        raise UnknownPtx(text)
    return f"(({kind}){text}LL)"


def _label(text: str) -> str:
    return text.replace("$", "dollar_")


class _Memory(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_uint64) for name in ("fault", "address", "width")],
        ("stored", ctypes.c_uint64 * 5),
        *[(name, ctypes.c_uint64) for name in ("count", "last")],
        ("live", ctypes.c_void_p),
    ]


def compiled(
    source: str, options: tuple[str, ...], output: str = "CUBIN"
) -> tuple[bytes, str]:
    """Machine code (`CUBIN` or `PTX`) and the compiler's log; it needs no GPU.

    Raises:
        RuntimeError: the source does not compile; with the log.
    """
    from cupy_backends.cuda.libs import nvrtc  # below CuPy, where none stands in

    program = nvrtc.createProgram(source, "copy_runs.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return getattr(nvrtc, f"get{output}")(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(nvrtc.getProgramLog(program)) from error
    finally:
        nvrtc.destroyProgram(program)


def missing() -> str:
    """Why device code cannot run here, or ""."""
    try:
        compiled("", (), "PTX")
    except (ImportError, OSError, RuntimeError):
        return "no NVRTC: pip install cupy-cuda13x nvidia-cuda-nvrtc (the dev extra)"
    if not any(map(shutil.which, COMPILERS)):
        return f"no C compiler: none of {', '.join(COMPILERS)}"
    return ""


@dataclass(frozen=True)
class DeviceCode:
    """CUDA source whose kernels run on this machine's CPU.

    Args:
        folder: for the C text and the library.
        source: CUDA text; default: csrc.
        options: NVRTC's, without the architecture.
        optimise: -O1; without, it compiles faster and runs slower.
    """

    folder: Path
    source: str = ""
    options: tuple[str, ...] = NVRTC_OPTIONS
    optimise: bool = True

    @cached_property
    def _library(self) -> ctypes.CDLL:
        options = (*self.options, f"--gpu-architecture=compute_{ARCHITECTURE}")
        source = self.source or source_path().read_text()
        ptx, _ = compiled(source, options, "PTX")
        text, target = self.folder / "kernels.c", self.folder / "kernels.so"
        text.write_text(translate(ptx.rstrip(b"\0").decode()))
        compiler = next(filter(None, map(shutil.which, COMPILERS)))
        flags = ["-O1" if self.optimise else "-O0", "-w", "-fno-strict-aliasing"]
        command = [compiler, "-std=gnu11", *flags, "-fwrapv", "-shared", "-fPIC"]
        subprocess.run([*command, str(text), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))

    def has(self, kernel: str) -> bool:
        """Whether the source has such a kernel."""
        return hasattr(self._library, kernel)

    def run(self, kernel, ctas, args, live, first_cta=0):
        """Run thread blocks `first_cta` … of a grid; bytes stored by item width.

        Args:
            live: (address, number of bytes) of all memory that it may touch.

        Raises:
            DeviceFault: a device would stop here.
        """
        ranges = np.array(sorted((at, at + size) for at, size in live), np.uint64)
        memory = _Memory(count=len(ranges), live=ranges.ctypes.data)
        words = (ctypes.c_uint64 * len(args))(*args)
        grid = first_cta, ctas, ctas, THREADS_PER_CTA
        if getattr(self._library, kernel)(ctypes.byref(memory), words, *grid):
            raise DeviceFault(
                f"{kernel}: {FAULTS[memory.fault]}: "
                f"{memory.width} bytes at {memory.address:#x}"
            )
        return {w: n for w, n in zip(WIDTHS, memory.stored, strict=True) if n}
