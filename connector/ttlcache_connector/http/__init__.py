"""What the API server does for us: who a request belongs to, and `/ttlcache/…`."""
