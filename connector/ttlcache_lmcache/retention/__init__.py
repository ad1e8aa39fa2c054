"""Which chunks LMCache keeps and for how long: programs, turns and TTLs over chunk
hashes."""
