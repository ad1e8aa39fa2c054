"""The CPU tier in the box: KV blocks in pinned host memory of the worker process.

The scheduler's half knows exactly what is there; the worker's half copies.
"""
