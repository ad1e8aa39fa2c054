"""TCP ports on this machine that nothing listens on, reserved for this process."""

from __future__ import annotations

import socket

#: Bound, never listening. Linux gives their ports to no other `bind(0)` and to no
#: connection, and lets a server that sets SO_REUSEADDR, as all of ours do, bind them
#: too: no two processes are told the same port, and a restart finds it free.
_reserved: list[socket.socket] = []


def free_ports(number: int) -> list[int]:
    """So many different ones, kept until this process ends."""
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
    _reserved.extend(probes)
    return [int(probe.getsockname()[1]) for probe in probes]
