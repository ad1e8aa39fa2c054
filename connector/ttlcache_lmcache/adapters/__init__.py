"""Where LMCache calls us: listeners, gates, its eviction, its L2 interface."""
