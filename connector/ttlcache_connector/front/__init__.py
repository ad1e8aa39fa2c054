"""`ttlcache front`: a proxy before a router that gives every program its own key.

Needs neither vLLM nor a GPU.
"""
