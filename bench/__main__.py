"""``python -m bench`` runs the command line of :mod:`bench.cli`."""

from __future__ import annotations

from bench.cli import app
from bench.serve.process import stop_servers_on_signals

if __name__ == "__main__":
    stop_servers_on_signals()
    app()
