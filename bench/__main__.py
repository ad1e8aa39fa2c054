"""``python -m bench`` runs the command line of :mod:`bench.cli`."""

from __future__ import annotations

import sys

from bench.serve.process import stop_servers_on_signals

if __name__ == "__main__":
    stop_servers_on_signals()
    if sys.argv[1:2] == ["gpu"]:
        # Says itself what is missing, where the other benches could not be imported.
        from bench.gpu.run import app

        app(sys.argv[2:], prog_name="bench gpu")
    else:
        from bench.cli import app

        app()
