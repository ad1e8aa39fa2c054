"""Eviction by program for people who run LMCache without TTLConnector: LMCache plugins.

- `ttlcache_lmcache.server_module`: for `lmcache server --server-module`;
- `ttlcache_lmcache.l2_adapter`: for `lmcache server --l2-adapter`;
- `ttlcache_lmcache.client`: how a program next to the engine tells the server more.

Only `adapters`, `compat`, `client`, `server_module` and `l2_adapter` import lmcache;
none imports vllm. See docs/lmcache.md.
"""
