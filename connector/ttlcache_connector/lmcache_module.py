"""The name by which users give our module to LMCache's `--server-module`."""

from ttlcache_connector.lmcache_server.module import build_server_modules

__all__ = ["build_server_modules"]
