"""How long a finished turn is pinned, where a pin ends, and which pins may be taken
for a request: the judge is `Reclaimer`."""
