"""Which LMCache versions are tested, and where the plugins get into its server."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import logging
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ttlcache.errors import UnsupportedEngineError
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


def check_tested(
    name: str,
    version: str,
    tested: str,
    override: str,
    *,
    allow: bool,
    log: logging.Logger,
) -> str:
    """The version, if tests of ours have seen it.

    Args:
        override: what to set to have others allowed.

    Raises:
        UnsupportedEngineError: they have not, and it is not.
    """
    with contextlib.suppress(InvalidVersion):
        # A pre-release counts as its release: ours are tested from the first one on.
        if SpecifierSet(tested).contains(Version(version).base_version):
            return version
    if not allow:
        raise UnsupportedEngineError(
            f"{name} {version} is outside the range that ttlcache {ttlcache_version()} "
            f"was tested with ({tested}); set {override} to try it"
        )
    log.warning("ttlcache runs on untested %s %s (tested: %s)", name, version, tested)
    return version


def check_lmcache(*, allow_untested: bool, override: str = _OVERRIDE) -> str:
    """As `check_tested`; UnsupportedEngineError also where LMCache is not installed."""
    version, log = lmcache_version(), logger(__name__)
    if version is None:
        raise UnsupportedEngineError("LMCache is not installed: pip install lmcache")
    return check_tested(
        "LMCache", version, TESTED_LMCACHE, override, allow=allow_untested, log=log
    )


def only_l1(storage_manager: Any) -> Any:
    """The server's L1; None where it has several, of which each would need a budget.

    Raises:
        UnsupportedEngineError: this LMCache keeps it elsewhere, or evicts otherwise.
    """
    managers = getattr(storage_manager, "_l1_managers_by_id", None)
    controllers = getattr(storage_manager, "_eviction_controllers", None)
    reserve = getattr(storage_manager, "reserve_write", None)
    if (
        not managers
        or reserve is None
        or list(inspect.signature(reserve).parameters) != ["keys", "layout_desc"]
        or not controllers
        or not all(map(internals.asks_a_policy, controllers))
    ):
        raise UnsupportedEngineError(
            f"LMCache {lmcache_version()}: its L1 or how that evicts looks different "
            "from the one tested; ttlcache's server module cannot replace it"
        )
    (first, *others) = managers.values()
    if others or internals.num_write_managers(storage_manager) != 1:
        return None
    return first
