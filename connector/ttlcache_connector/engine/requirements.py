"""What TTLConnector needs of vLLM and LMCache; what lacks it is refused."""

from __future__ import annotations

import importlib
from typing import Any

from ttlcache.errors import ConfigError
from ttlcache_connector.log import logger
from ttlcache_lmcache import compat

#: Versions of vLLM that our tests run on.
TESTED_VLLM = ">=0.32,<0.34"
_OVERRIDE = '"allow_untested_vllm": true in kv_connector_extra_config'

log = logger(__name__)


def vllm_version() -> str:
    """The version of the vllm module at hand, whatever its distribution is called."""
    return str(importlib.import_module("vllm").__version__)


def check_vllm(*, allow_untested: bool) -> str:
    """Refuse vLLM versions that no test of ours has seen.

    Returns:
        The version.

    Raises:
        UnsupportedEngineError: outside the tested range and not overridden.
    """
    version = vllm_version()
    if not compat.is_in(version, TESTED_VLLM):
        _refuse(f"vLLM {version}", TESTED_VLLM, allow=allow_untested)
    return version


def check_lmcache_tier(*, allow_untested: bool) -> None:
    """Refuse an LMCache that is not there or was not tested.

    Raises:
        ConfigError: LMCache is not installed.
        UnsupportedEngineError: it was not tested.
    """
    if (lmcache := compat.lmcache_version()) is None:
        raise ConfigError(
            "key 'lower_tier' has value 'lmcache', expected: 'none' where LMCache is "
            "not installed; install vllm and lmcache>=0.5.6 in one pip command"
        )
    if not compat.is_in(lmcache, compat.TESTED_LMCACHE):
        _refuse(f"LMCache {lmcache}", compat.TESTED_LMCACHE, allow=allow_untested)


def _refuse(found: str, tested: str, *, allow: bool) -> None:
    compat.refuse_untested(found, tested, _OVERRIDE, allow=allow, log=log)


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
