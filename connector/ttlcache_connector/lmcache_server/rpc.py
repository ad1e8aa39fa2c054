"""Questions that the scheduler asks our module in LMCache's server."""

from __future__ import annotations

#: RPC of the server module: request id as JSON -> {"cpu": tokens, "disk": tokens}.
LOOKUP_TIERS = "ttlcache.lookup_tiers"
#: Another one: nothing -> {"cpu_bytes": of the server's memory} if a lookup's key may
#: begin within a context, else null.
LOOKUPS_BEGIN_ANYWHERE = "ttlcache.lookups_begin_anywhere"
