"""`ttlcache serve-tiers`: check the versions, print vLLM's flag, run the server."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ttlcache.cli.common import fail
from ttlcache.errors import TTLCacheError, UnsupportedEngineError
from ttlcache_connector.engine import requirements
from ttlcache_connector.lmcache_server.launch import TierOptions

_DEFAULTS = TierOptions()


def serve_tiers(
    cpu_gb: Annotated[
        float, typer.Option(help="CPU memory for KV, in GB.", min=0.01, max=1e9)
    ] = _DEFAULTS.cpu_gb,
    disk: Annotated[
        Path | None, typer.Option(help="Folder of the disk tier; none by default.")
    ] = None,
    disk_gb: Annotated[
        float | None,
        typer.Option(
            help=f"Size of the disk tier, in GB ({_DEFAULTS.disk_gb:g}).",
            min=0.01,
            max=1e9,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULTS.host,
    port: Annotated[
        int, typer.Option(help="Port for vLLM.", min=1, max=65535)
    ] = _DEFAULTS.port,
    http_host: Annotated[
        str,
        typer.Option(
            help="Address of LMCache's own HTTP interface: /metrics, /healthcheck, and "
            "administration without a password."
        ),
    ] = _DEFAULTS.http_host,
    http_port: Annotated[
        int, typer.Option(help="Port of that interface.", min=1, max=65535)
    ] = _DEFAULTS.http_port,
    chunk_tokens: Annotated[
        int,
        typer.Option(help="Smallest unit stored; a multiple of vLLM's block.", min=1),
    ] = _DEFAULTS.chunk_tokens,
    retention: Annotated[
        bool,
        typer.Option(
            "--retention",
            help="Evict from CPU memory by program, as told by the connector, not by "
            "LMCache's LRU.",
        ),
    ] = False,
    allow_untested: Annotated[
        bool,
        typer.Option(
            "--allow-untested", help="Run on versions that were not tested together."
        ),
    ] = False,
    print_only: Annotated[
        bool, typer.Option("--print-only", help="Print both command lines and end.")
    ] = False,
    server_args: Annotated[
        list[str] | None, typer.Argument(help="More arguments for lmcache server.")
    ] = None,
) -> None:
    """Run an LMCache server below TTLConnector: CPU memory and disk."""
    with _fail_in_one_line():
        requirements.check_vllm(allow_untested=allow_untested)
        requirements.check_lmcache_tier(allow_untested=allow_untested)
    options = TierOptions(
        cpu_gb=cpu_gb,
        disk=disk,
        disk_gb=disk_gb or _DEFAULTS.disk_gb,
        host=host,
        port=port,
        http_host=http_host,
        http_port=http_port,
        chunk_tokens=chunk_tokens,
        retention=retention,
        allow_untested=allow_untested,
        extra=tuple(server_args or ()),
    )
    if disk_gb is not None and disk is None:
        fail("--disk-gb is the size of a disk tier: say where with --disk")
    typer.echo("Start vLLM with:\n")
    typer.echo(f"  vllm serve MODEL {options.vllm_flag()}\n")
    if print_only:
        typer.echo(shlex.join(options.command()))
        return
    if _is_taken(options.host, options.port):
        # Before anything of the server that runs there is touched.
        fail(
            f"{options.host}:{options.port} is in use. Where an LMCache server runs "
            "there, stop it first; for a second one take another --port and --http-port"
        )
    from ttlcache_lmcache.store import disk_index  # needs the lmcache extra

    with _fail_in_one_line("--disk: "):
        if options.disk is not None:
            disk_index.lock_folder(options.disk).close()
    # Containers that share /dev/shm may each have the port.
    place = options.segment.with_name(options.shm_name)
    with _fail_in_one_line("--port: "):
        lock = disk_index.lock_folder(place)
    options.segment.unlink(missing_ok=True)  # of a server that was killed
    try:
        _check_room(options)
        raise typer.Exit(_run(options, lock.fileno()))
    finally:
        shutil.rmtree(place, ignore_errors=True)  # another user may be next


@contextlib.contextmanager
def _fail_in_one_line(prefix: str = "") -> Iterator[None]:
    """End with what to do where the tiers cannot run; LMCache shows a traceback."""
    try:
        yield
    except UnsupportedEngineError as error:
        fail(f"{error}; for this command it is --allow-untested")
    except TTLCacheError as error:
        fail(f"{prefix}{error}")
    except ImportError as error:
        fail(f"{error}; install both at once: pip install 'ttlcache[vllm,lmcache]'")


def _is_taken(host: str, port: int) -> bool:
    """Whether somebody listens there; what cannot be asked is left to LMCache."""
    with socket.socket() as probe:
        # As ZeroMQ does: connections of a server that has ended are in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "*" else host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        except UnicodeError:
            fail(f"--host {host!r} is no name of a host")
    return False


def _check_room(options: TierOptions) -> None:
    import psutil  # of the lmcache extra: the front has it not

    available_gb = psutil.virtual_memory().available / 1e9
    if options.cpu_gb > available_gb:
        sizes = f"{options.cpu_gb:g}, this machine has {available_gb:.3g} GB available"
        fail(f"--cpu-gb is {sizes}")
    if options.disk is not None:
        kept = sum(path.stat().st_blocks * 512 for path in options.disk.rglob("*.kv"))
        disk_gb = (shutil.disk_usage(options.disk).free + kept) / 1e9
        if disk_gb < options.disk_gb:
            typer.echo(
                f"warning: {options.disk} has room for {disk_gb:.1f} GB, less than "
                f"--disk-gb {options.disk_gb:g}: once the file system is full, each "
                "store fails once before another object makes way for it",
                err=True,
            )
    room_gb = shutil.disk_usage(options.segment.parent).free / 1e9
    if room_gb < options.cpu_gb:
        typer.echo(
            f"warning: {options.segment.parent} has {room_gb:.1f} GB free, less than "
            f"--cpu-gb {options.cpu_gb:g}: LMCache will share no memory, and vLLM will "
            "not start above it. Mount it larger (docker: --ipc=host or --shm-size) or "
            'set "lmcache.mp.mp_transfer_mode" to "lmcache_driven"',
            err=True,
        )


def _run(options: TierOptions, lock_fd: int) -> int:
    """LMCache in a child, so that its end can be cleaned up after.

    Args:
        lock_fd: keeps others from its shared memory; the child may outlive us.
    """
    child = subprocess.Popen(
        options.command(),
        env={**os.environ, **options.environment()},
        # Ctrl-C reaches it through us alone: at a second one it would end at once,
        # with what is on its way to the disk.
        process_group=0,
        pass_fds=(lock_fd,),
    )

    def forward(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    try:
        return child.wait()
    finally:
        options.segment.unlink(missing_ok=True)
