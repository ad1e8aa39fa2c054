"""Results become tables, figures and docs/bench.md."""
