"""How long a finished turn is pinned, which pins give way under pressure, and where a
pin ends."""
