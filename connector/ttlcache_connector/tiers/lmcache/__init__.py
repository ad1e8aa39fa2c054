"""LMCache as the lower tier: CPU memory and disk, through its multiprocess mode.

What vLLM's side knows about LMCache (0.5.6) is in this folder, what runs in its server
in `lmcache_server`; the names that LMCache keeps private are in
`ttlcache_lmcache.internals`. Both halves drive LMCache's own
`LMCacheMPConnector`; nothing of it is copied. What is changed:

- *what* is stored *when*: its lazy offload asks our `StoreQueue`, not its own
  policies (`LazyOffloadManager._policy`);
- *how* bytes move, where there is one KV cache group: by our transfer path, through
  LMCache's worker-driven protocol (it hands out slots of its memory, the worker copies)
  on a thread of ours, so that a server that is slow or gone costs a miss and never a
  step (`registration`);
- its timeouts, which are meant for start-up and would stall requests for minutes.
"""
