"""What TTLConnector needs of vLLM and LMCache; what lacks it is refused."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ttlcache.errors import ConfigError, UnsupportedEngineError
from ttlcache_connector.log import logger

#: Versions of vLLM that our tests run on.
TESTED_VLLM = ">=0.30,<0.34"
#: LMCache versions whose insides `tiers.lmcache` was tested with, and vLLM's.
TESTED_LMCACHE = ">=0.5.6,<0.6"
LMCACHE_NEEDS_VLLM = ">=0.32"

log = logger(__name__)


def vllm_version() -> str:
    """The version of the vllm module at hand, whatever its distribution is called."""
    return str(importlib.import_module("vllm").__version__)


def ttlcache_version() -> str:
    try:
        return importlib.metadata.version("ttlcache")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def check_vllm(*, allow_untested: bool) -> str:
    """Refuse vLLM versions that no test of ours has seen.

    Returns:
        The version.

    Raises:
        UnsupportedEngineError: outside the tested range and not overridden.
    """
    version = vllm_version()
    if _is_in(version, TESTED_VLLM):
        return version
    if not allow_untested:
        raise UnsupportedEngineError(
            f"vLLM {version} is outside the range that ttlcache "
            f"{ttlcache_version()} was tested with ({TESTED_VLLM}); set "
            '"allow_untested_vllm": true in kv_connector_extra_config to try it'
        )
    log.warning("ttlcache runs on untested vLLM %s (tested: %s)", version, TESTED_VLLM)
    return version


def check_lower_tier(lower_tier: str, *, allow_untested: bool) -> None:
    """Refuse a lower tier that is not there or was not tested.

    Raises:
        ConfigError: LMCache is not installed.
        UnsupportedEngineError: the pair of versions was not tested.
    """
    if lower_tier == "none":
        return
    try:
        lmcache = importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "key 'lower_tier' has value 'lmcache', expected: 'none' where LMCache is "
            "not installed; install vllm and lmcache>=0.5.6 in one pip command"
        ) from None
    vllm = vllm_version()
    if _is_in(lmcache, TESTED_LMCACHE) and _is_in(vllm, LMCACHE_NEEDS_VLLM):
        return
    tested = f"LMCache {TESTED_LMCACHE} with vLLM {LMCACHE_NEEDS_VLLM}"
    if not allow_untested:
        raise UnsupportedEngineError(
            f"LMCache {lmcache} with vLLM {vllm} is outside of what ttlcache "
            f"{ttlcache_version()} was tested with ({tested}); set "
            '"allow_untested_vllm": true in kv_connector_extra_config to try it'
        )
    log.warning(
        "ttlcache runs on untested LMCache %s with vLLM %s (tested: %s)",
        lmcache,
        vllm,
        tested,
    )


def check_engine(vllm_config: Any) -> None:
    """Refuse engine settings under which retention cannot work.

    Raises:
        ConfigError: prefix caching is off.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "TTLConnector needs prefix caching: a retained turn is found again "
            "through it; remove --no-enable-prefix-caching, or add "
            "--enable-prefix-caching if it was vLLM that left it off for this model "
            "(value of enable_prefix_caching: False, expected: True)"
        )


def _is_in(version: str, tested: str) -> bool:
    try:
        # A pre-release counts as its release: ours are tested from the first one on.
        return SpecifierSet(tested).contains(Version(version).base_version)
    except InvalidVersion:
        return False
