"""Benches and the demo: run with ``python -m bench``, imported by nobody."""
