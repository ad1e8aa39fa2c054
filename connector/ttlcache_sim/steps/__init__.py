"""How long an engine step takes: GPUs, models, a roofline, measured profiles."""
