"""Keep the KV cache of LLM agents in GPU memory between their turns.

The engine-agnostic core: it decides, counts and orders; it never imports an
engine. `ttlcache_connector` is the adapter to vLLM.
"""
