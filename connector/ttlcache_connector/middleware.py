"""The name by which users give our middleware to vLLM's `--middleware`."""

from ttlcache_connector.http.middleware import ProgramIdMiddleware

__all__ = ["ProgramIdMiddleware"]
