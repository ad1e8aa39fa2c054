"""`ttlcache serve-tiers`: check the versions, print vLLM's flag, run the server."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from ttlcache.errors import TTLCacheError
from ttlcache_connector import compat
from ttlcache_connector.serve_tiers import TierOptions

_DEFAULTS = TierOptions()


def serve_tiers(
    cpu_gb: Annotated[
        float, typer.Option(help="CPU memory for KV, in GB.", min=0.01)
    ] = _DEFAULTS.cpu_gb,
    disk: Annotated[
        Path | None, typer.Option(help="Folder of the disk tier; none by default.")
    ] = None,
    disk_gb: Annotated[
        float, typer.Option(help="Size of the disk tier, in GB.", min=0.01)
    ] = _DEFAULTS.disk_gb,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULTS.host,
    port: Annotated[int, typer.Option(help="Port for vLLM.")] = _DEFAULTS.port,
    http_host: Annotated[
        str,
        typer.Option(
            help="Address of LMCache's own HTTP interface: /metrics, /healthcheck, and "
            "administration without a password."
        ),
    ] = _DEFAULTS.http_host,
    http_port: Annotated[
        int, typer.Option(help="Port of that interface.")
    ] = _DEFAULTS.http_port,
    chunk_tokens: Annotated[
        int,
        typer.Option(help="Smallest unit stored; a multiple of vLLM's block.", min=1),
    ] = _DEFAULTS.chunk_tokens,
    retention: Annotated[
        bool,
        typer.Option(
            "--retention",
            help="Evict from CPU memory by program and deadline, as told by the "
            "connector, not by LMCache's LRU.",
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
    try:
        compat.check_vllm(allow_untested=False)
        compat.check_lower_tier("lmcache", allow_untested=False)
    except TTLCacheError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    options = TierOptions(
        cpu_gb=cpu_gb,
        disk=disk,
        disk_gb=disk_gb,
        host=host,
        port=port,
        http_host=http_host,
        http_port=http_port,
        chunk_tokens=chunk_tokens,
        retention=retention,
        extra=tuple(server_args or ()),
    )
    typer.echo("Start vLLM with:\n")
    typer.echo(f"  vllm serve MODEL {options.vllm_flag()}\n")
    if print_only:
        typer.echo(shlex.join(options.command()))
        return
    options.segment.unlink(missing_ok=True)  # of a server that was killed
    raise typer.Exit(_run(options))


def _run(options: TierOptions) -> int:
    """LMCache in a child, so that its end can be cleaned up after."""
    child = subprocess.Popen(
        options.command(), env={**os.environ, **options.environment()}
    )

    def forward(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    try:
        return child.wait()
    finally:
        options.segment.unlink(missing_ok=True)
