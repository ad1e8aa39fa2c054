"""What the scheduler asks our module in LMCache's server."""

from __future__ import annotations

#: RPC of the server module: request id as JSON -> {"cpu": tokens, "disk": tokens}.
LOOKUP_TIERS = "ttlcache.lookup_tiers"
