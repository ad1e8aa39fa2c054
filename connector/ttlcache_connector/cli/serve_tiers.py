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

import typer
from rich.console import Console

from ttlcache.cli.common import fail
from ttlcache.errors import TTLCacheError, UnsupportedEngineError
from ttlcache_connector.engine import requirements
from ttlcache_connector.lmcache_server.launch import TierOptions


def serve_tiers(options: TierOptions, _: Console) -> int:
    """Run an LMCache server below TTLConnector: CPU memory and disk."""
    with _fail_in_one_line():
        requirements.check_vllm(allow_untested=options.allow_untested)
        requirements.check_lmcache_tier(allow_untested=options.allow_untested)
    if options.disk_gb is not None and options.disk is None:
        fail("--disk-gb is the size of a disk tier: say where with --disk")
    typer.echo("Start vLLM with:\n")
    typer.echo(f"  vllm serve MODEL {options.vllm_flag()}\n")
    if options.print_only:
        typer.echo(shlex.join(options.command()))
        return 0
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
        return _run(options, lock.fileno())
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
    import psutil  # comes with the lmcache extra; `ttlcache front` runs without it

    available_gb = psutil.virtual_memory().available / 1e9
    if options.cpu_gb > available_gb:
        sizes = f"{options.cpu_gb:g}, this machine has {available_gb:.3g} GB available"
        fail(f"--cpu-gb is {sizes}")
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
