"""`ttlcache doctor --lmcache …`: the server below us, and our plugins for LMCache."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Iterator, Sequence

from ttlcache.errors import TTLCacheError
from ttlcache_connector.cli.findings import BAD, NOTE, OK, Finding
from ttlcache_lmcache import compat

#: Asks for the installation alone.
PLUGINS = "plugins"

_MODULES = {
    "server module": "ttlcache_lmcache.server_module",
    "L2 adapter": "ttlcache_lmcache.l2_adapter",
    "storage plugin": "ttlcache_lmcache.storage_plugin",
}


def findings(given: Sequence[str]) -> Iterator[Finding]:
    """Whether servers answer at the addresses, and whether our plugins load here."""
    if not given:
        return
    # An address may be another machine's, where other packages are installed.
    bad = BAD if PLUGINS in given else NOTE
    yield from (_reach(text) for text in given if text != PLUGINS)
    try:
        version = compat.check_lmcache(allow_untested=False)
        yield Finding(OK, "LMCache version", f"{version}, tested")
    except TTLCacheError as error:
        yield Finding(bad, "LMCache version", str(error))
        if compat.lmcache_version() is None:
            return
    for plugin, module in _MODULES.items():
        try:
            importlib.import_module(module)
            yield Finding(OK, plugin, "loads")
        except Exception as error:  # noqa: BLE001 - any reason not to load is one
            yield Finding(bad, plugin, f"{module}: {type(error).__name__}: {error}")


def _reach(address: str) -> Finding:
    # As vLLM's flag has it, or as sockets do.
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host or "127.0.0.1", int(port)), timeout=3.0):
            return Finding(OK, "LMCache server", f"{address} answers")
    except OSError as error:
        return Finding(BAD, "LMCache server", f"{address}: {error}")
    except (ValueError, OverflowError):
        text = f"{address!r}; expected HOST:PORT, or {PLUGINS!r}"
        return Finding(BAD, "LMCache server", text)
