"""Rivals, sweeps and fleets on the simulator (`ttlcache_sim`)."""
