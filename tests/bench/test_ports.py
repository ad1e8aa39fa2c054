"""Ports that are told to nobody else before their server is there."""

from __future__ import annotations

import socket
import subprocess
import sys

from bench.serve.ports import free_ports

TELL = "from bench.serve.ports import free_ports; print(*free_ports(200))"


def test_two_processes_are_never_told_the_same() -> None:
    ours = free_ports(200)
    done = subprocess.run(
        [sys.executable, "-c", TELL], capture_output=True, text=True, check=True
    )
    theirs = {int(port) for port in done.stdout.split()}
    assert len(theirs) == len(set(ours)) == 200
    assert not theirs & set(ours)


def test_a_server_may_have_it_and_have_it_again() -> None:
    (port,) = free_ports(1)
    for _ in range(2):
        with socket.create_server(("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port), timeout=10.0).close()
