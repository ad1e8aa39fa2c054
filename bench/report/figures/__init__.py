"""Figures and docs/benchmarks.md, rendered from the numbers in bench/results."""
