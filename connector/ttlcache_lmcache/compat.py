"""Which LMCache versions are tested, and where the plugins get into its server."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import os
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ttlcache.errors import ConfigError, UnsupportedEngineError
from ttlcache_lmcache import internals

#: LMCache versions that our tests run on.
TESTED_LMCACHE = ">=0.5.6,<0.6"
_OVERRIDE = '"allow_untested_lmcache": true in the plugin\'s configuration'


def logger(name: str) -> logging.Logger:
    """A logger that shows: LMCache's handlers sit on loggers that it made itself."""
    from lmcache.logging import init_logger

    made: logging.Logger = init_logger(name)
    return made


def lmcache_version() -> str | None:
    """The installed version, None where LMCache is not installed."""
    try:
        return importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        return None


def ttlcache_version() -> str:
    try:
        return importlib.metadata.version("ttlcache")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def is_in(version: str, tested: str) -> bool:
    try:
        # A pre-release counts as its release: ours are tested from the first one on.
        return SpecifierSet(tested).contains(Version(version).base_version)
    except InvalidVersion:
        return False


def refuse_untested(
    found: str, tested: str, override: str, *, allow: bool, log: logging.Logger
) -> None:
    """Of what no test of ours has seen.

    Args:
        override: what to set to have it allowed.

    Raises:
        UnsupportedEngineError: it is not.
    """
    if not allow:
        raise UnsupportedEngineError(
            f"{found} is outside the range that ttlcache {ttlcache_version()} was "
            f"tested with ({tested}); set {override} to try it"
        )
    log.warning("ttlcache runs on untested %s (tested: %s)", found, tested)


def check_lmcache(*, allow_untested: bool) -> str:
    """Refuse LMCache versions that no test of ours has seen.

    Returns:
        The version.

    Raises:
        UnsupportedEngineError: not installed, or untested and not overridden.
    """
    version = lmcache_version()
    if version is None:
        raise UnsupportedEngineError("LMCache is not installed: pip install lmcache")
    if not is_in(version, TESTED_LMCACHE):
        refuse_untested(
            f"LMCache {version}",
            TESTED_LMCACHE,
            _OVERRIDE,
            allow=allow_untested,
            log=logger(__name__),
        )
    return version


def l1_managers(storage_manager: Any) -> list[Any]:
    """The server's L1 managers; 0.5 has no public accessor.

    Raises:
        UnsupportedEngineError: this LMCache keeps them elsewhere.
    """
    managers = getattr(storage_manager, "_l1_managers_by_id", None)
    if not managers:
        raise UnsupportedEngineError(
            f"LMCache {lmcache_version()}: no L1 managers found (private attribute "
            "_l1_managers_by_id); ttlcache's server module cannot watch L1"
        )
    return list(managers.values())


def take_over_eviction(storage_manager: Any, gate: Any) -> bool:
    """Put a `StoreGate` before writes into L1, and let LMCache evict nothing by itself.

    LMCache 0.5 has a closed list of eviction policies and no plugin point for
    admission. The server serves nobody yet when its modules are built.

    Returns:
        False, and nothing is changed, where stores go to several L1s, of which each
        would need its own budget.

    Raises:
        UnsupportedEngineError: this LMCache looks different.
    """
    managers = l1_managers(storage_manager)
    controllers = getattr(storage_manager, "_eviction_controllers", None)
    reserve = getattr(storage_manager, "reserve_write", None)
    if (
        reserve is None
        or list(inspect.signature(reserve).parameters) != ["keys", "layout_desc"]
        or not controllers
        or not all(
            hasattr(each, "_eviction_policy")
            and hasattr(getattr(each, "_listener", None), "_policy")
            for each in controllers
        )
    ):
        raise UnsupportedEngineError(
            f"LMCache {lmcache_version()}: its L1 eviction looks different from the "
            "one tested; ttlcache's server module cannot replace it"
        )
    if len(managers) != 1 or internals.num_write_managers(storage_manager) != 1:
        return False
    from lmcache.v1.distributed.eviction_policy import NoOpEvictionPolicy

    (manager,) = managers
    reserve_in_l1 = manager.reserve_write

    def reserve_with_room(keys: list[Any], *args: Any, **more: Any) -> Any:
        gate.make_room(keys)  # loads from L2 ask the L1 manager itself
        return reserve_in_l1(keys, *args, **more)

    def reserve_admitted(keys: list[Any], layout_desc: Any) -> Any:
        return gate.store(keys, lambda chosen: reserve(chosen, layout_desc))

    manager.reserve_write = reserve_with_room
    storage_manager.reserve_write = reserve_admitted
    for controller in controllers:
        internals.replace_eviction_policy(controller, NoOpEvictionPolicy())
    return True


def check_event_bus(server_context: Any) -> None:
    """Lookups reach us over LMCache's event bus only.

    Raises:
        ConfigError: it is turned off.
    """
    if not server_context.event_bus.enabled:
        raise ConfigError(
            "ttlcache's server module needs LMCache's event bus to see lookups; "
            "remove --disable-observability (value: set, expected: not set)"
        )


def check_hash(engine_config: Any) -> None:
    """Refuse the in-process mode's default hash: other processes have other keys.

    Raises:
        ConfigError: `pre_caching_hash_algorithm` is "builtin" and nothing seeds it.
    """
    name = getattr(engine_config, "pre_caching_hash_algorithm", None)
    if name == "builtin" and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            "key 'pre_caching_hash_algorithm' has value 'builtin', expected: "
            "'sha256_cbor' (Python's own hash differs in every process, so nothing on "
            "disk would ever be found again)"
        )
