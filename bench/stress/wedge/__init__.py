"""Randomised schedules on vLLM's real scheduler: no wedge, no leak, no broken table."""
