"""Keep the KV cache of LLM agents in GPU memory between their turns.

The engine-agnostic core: it decides, counts and orders; it never imports an
engine. `ttlcache_connector` is the adapter to vLLM.
"""

from ttlcache.clock import Clock, VirtualClock
from ttlcache.config import TTLCacheConfig, load_config
from ttlcache.controller import Controller
from ttlcache.errors import ConfigError, TTLCacheError, UnsupportedEngineError
from ttlcache.types import Decision, GapKey, PinOutcome, Pressure, TurnFacts

__all__ = [
    "Clock",
    "ConfigError",
    "Controller",
    "Decision",
    "GapKey",
    "PinOutcome",
    "Pressure",
    "TTLCacheConfig",
    "TTLCacheError",
    "TurnFacts",
    "UnsupportedEngineError",
    "VirtualClock",
    "load_config",
]
