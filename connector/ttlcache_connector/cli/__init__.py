"""Commands of `ttlcache` that need vLLM; `ttlcache.cli.main` loads them."""
