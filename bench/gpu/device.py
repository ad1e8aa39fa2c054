"""Stage `preflight`: what the machine has, and in a sentence what it lacks."""

from __future__ import annotations

import importlib.metadata
import resource
import shutil
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.gpu.stage import Stage, Verdict
from bench.tables import Check
from ttlcache.errors import TransferError
from ttlcache.transfer.cupy_runtime import CupyRuntime

if TYPE_CHECKING:
    from bench.gpu.sizes import Sizes

_REPEATS = 5
_STREAM = 0  # the default one


def preflight(stage: Stage) -> Verdict:
    """Driver, CUDA, packages, memory, and how fast one pinned copy is each way."""
    probes: dict[str, Callable[[], str]] = {
        "ttlcache": _plugin,
        "CuPy": _cupy,
        "pinned memory": partial(_pinned, stage),
        "C compiler": _compiler,
        "/dev/shm": partial(_shared_memory, stage.sizes),
    }
    of_device: dict[str, Callable[[], str]] = {
        "driver": partial(_driver, stage.machine),
        "torch": _torch,
        "free GPU memory": partial(_free_memory, stage.sizes.free_gpu_bytes),
        "vLLM": _vllm,
        "LMCache": _lmcache,
    }
    checks, bars = (
        [_probe(name, probe) for name, probe in some.items()]
        for some in (probes, of_device)
    )
    return Verdict(checks, bars)


def link_gb_per_s(num_bytes: int) -> dict[str, float]:
    """One pinned copy each way, the best of `_REPEATS`; bytes by 1e9 and second."""
    runtime = CupyRuntime(0)
    runtime.activate()
    device, host = runtime.alloc_device(num_bytes), runtime.alloc_host(num_bytes)
    first, last = runtime.create_event(), runtime.create_event()
    found = {}
    for way, (dst, src) in {"store": (host, device), "load": (device, host)}.items():
        seconds = []
        for _ in range(_REPEATS):
            runtime.record(first, _STREAM)
            runtime.copy_2d(dst, num_bytes, src, num_bytes, num_bytes, 1, _STREAM)
            runtime.record(last, _STREAM)
            runtime.wait(last)
            seconds.append(runtime.elapsed_s(first, last))
        found[way] = num_bytes / max(min(seconds), 1e-9) / 1e9
    for event in (first, last):
        runtime.destroy_event(event)
    runtime.free_host(host)
    runtime.free_device(device)
    return found


def _probe(name: str, probe: Callable[[], str]) -> Check:
    """What a probe finds, or why it finds nothing; faults of ours are raised."""
    try:
        return Check(name, True, probe())
    except (ImportError, OSError, RuntimeError, AssertionError, TransferError) as error:
        return Check(name, False, f"{type(error).__name__}: {error}"[:300])


def _driver(machine: Any) -> str:
    if machine["gpu"] in ("none", "stand-in"):
        raise OSError("no NVIDIA driver here shows a device")
    return f"{machine['gpu']}, driver {machine['driver']}"


def _torch() -> str:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
    return f"{torch.__version__}, CUDA {torch.version.cuda}"


def free_gpu_bytes() -> int:
    import torch

    return torch.cuda.mem_get_info()[0]


def _free_memory(wanted_bytes: int) -> str:
    free_bytes = free_gpu_bytes()
    if free_bytes < wanted_bytes:
        raise RuntimeError(
            f"{free_bytes / 1e9:.0f} GB are free, the model and its KV take "
            f"{wanted_bytes / 1e9:.0f}"
        )
    return f"{free_bytes / 1e9:.0f} GB"


def _vllm() -> str:
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        name = current_platform.device_name
        raise RuntimeError(f"vLLM {vllm.__version__} runs on {name}, not on CUDA")
    return str(vllm.__version__)


def _plugin() -> str:
    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "ttlcache" not in group.names:
        raise RuntimeError("vLLM finds no plugin ttlcache: install its wheel")
    return str(importlib.metadata.version("ttlcache"))


def _lmcache() -> str:
    import torch  # noqa: F401 - its libraries are those of the extension
    from lmcache import cuda_ops  # noqa: F401 - is the compiled part there?

    return str(importlib.metadata.version("lmcache"))


def _cupy() -> str:
    import cupy

    runtime = CupyRuntime(0)
    batch = "with" if runtime.has_batch_copy else "without"
    return f"{cupy.__version__}, {batch} cuMemcpyBatchAsync"


def _pinned(stage: Stage) -> str:
    num_bytes = stage.sizes.pinned_bytes
    link = stage.cell("link", partial(link_gb_per_s, num_bytes))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
    return (
        f"{num_bytes >> 20} MiB pinned (ulimit -l: {allowed}); store "
        f"{link['store']:.1f}, load {link['load']:.1f} GB/s"
    )


def _shared_memory(sizes: Sizes) -> str:
    wanted = max(sizes.serve.cpu_gb, sizes.pin_vs_reload.cpu_gb) * 1e9
    free = shutil.disk_usage("/dev/shm").free
    if free < wanted:
        raise OSError(f"{free / 1e9:.1f} GB free, LMCache gets {wanted / 1e9:.1f} GB")
    return f"{free / 1e9:.1f} GB free"


def _compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        raise OSError("no C compiler, which Triton needs")
    return found
