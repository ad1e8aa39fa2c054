"""What TTLConnector needs of vLLM and LMCache; what lacks it is refused."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from ttlcache.errors import ConfigError, UnsupportedEngineError
from ttlcache_connector.log import logger

#: First tested version of vLLM, and the first one beyond the tested range.
TESTED_FROM = (0, 30)
TESTED_BELOW = (0, 34)
#: LMCache versions whose insides `tiers.lmcache` was tested with, and vLLM's.
LMCACHE_FROM = (0, 5, 6)
LMCACHE_BELOW = (0, 6)
LMCACHE_NEEDS_VLLM = (0, 32)

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
    numbers = _numbers(version)[:2]
    if TESTED_FROM <= numbers < TESTED_BELOW:
        return version
    tested = tested_range()
    if not allow_untested:
        raise UnsupportedEngineError(
            f"vLLM {version} is outside the range that ttlcache "
            f"{ttlcache_version()} was tested with ({tested}); set "
            '"allow_untested_vllm": true in kv_connector_extra_config to try it'
        )
    log.warning("ttlcache runs on untested vLLM %s (tested: %s)", version, tested)
    return version


def tested_range() -> str:
    """The versions of vLLM that our tests run on."""
    return f">={_dotted(TESTED_FROM)},<{_dotted(TESTED_BELOW)}"


def recurrent_cache_modes() -> tuple[str, ...]:
    """How vLLM may cache states of recurrent layers beside a prefix cache."""
    if _numbers(vllm_version())[:2] >= (0, 33):
        return ("align",)
    return ("none", "align", "all")


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
    good = LMCACHE_FROM <= _numbers(lmcache) < LMCACHE_BELOW
    if good and _numbers(vllm)[:2] >= LMCACHE_NEEDS_VLLM:
        return
    tested = (
        f"LMCache >={_dotted(LMCACHE_FROM)},<{_dotted(LMCACHE_BELOW)} with vLLM "
        f">={_dotted(LMCACHE_NEEDS_VLLM)}"
    )
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


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(p) for p in version.split(".")[:3] if p.isdigit())


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(str(n) for n in numbers)
