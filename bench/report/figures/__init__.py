"""Figures and docs/bench.md, rendered from the numbers in bench/results."""
