"""Commands of `ttlcache` that need vLLM; loaded by `ttlcache.cli.lazy`."""
