"""Results become tables, figures and docs/benchmarks.md."""
