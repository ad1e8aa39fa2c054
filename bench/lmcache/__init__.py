"""Our LMCache plugins against LMCache's own policies."""
