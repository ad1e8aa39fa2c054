"""`ttlcache …`: one module a command, put together in `main`.

Commands that need vLLM live in `ttlcache_connector` and `ttlcache_sim` and load it when
called, so that the others run on a laptop that only has a recording.
"""
