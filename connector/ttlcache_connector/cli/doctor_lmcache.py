"""`ttlcache doctor --lmcache …`: the server below us, and our plugins inside it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ttlcache_lmcache.diagnose import diagnose, is_given
from ttlcache_lmcache.findings import BAD, NOTE, OK, Finding

#: Asks for the installation alone.
PLUGINS = "plugins"


def asks_for_plugins(given: Sequence[str]) -> bool:
    """Whether our plugins for LMCache must load here."""
    return any(text == PLUGINS or is_given(text) for text in given)


def findings(given: Sequence[str]) -> Iterator[Finding]:
    """Addresses are reached, flags and files checked; each thing is said once."""
    # An address may be another machine's, where other packages are installed.
    bad = BAD if asks_for_plugins(given) else NOTE
    seen = set()
    for text in given:
        if not is_given(text) and text != PLUGINS:
            yield _reach(text)
        for found in diagnose(text if is_given(text) else None):
            finding = replace(found, state=bad) if found.state == BAD else found
            if finding not in seen:
                seen.add(finding)
                yield finding


def _reach(address: str) -> Finding:
    # As vLLM's flag has it, or as sockets do.
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host or "127.0.0.1", int(port)), timeout=3.0):
            return Finding(OK, "LMCache server", f"{address} answers")
    except OSError as error:
        return Finding(BAD, "LMCache server", f"{address}: {error}")
    except (ValueError, OverflowError):
        text = f"{address!r}; expected HOST:PORT, {PLUGINS!r}, a flag's JSON or a .yaml"
        return Finding(BAD, "LMCache server", text)
