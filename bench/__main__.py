"""``python -m bench`` runs the command line of :mod:`bench.cli`."""

from __future__ import annotations

from bench.cli import app

if __name__ == "__main__":
    app()
