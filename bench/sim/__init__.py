"""Rivals and sweeps on the simulator (`ttlcache_sim`)."""
