"""What TTLConnector needs of vLLM and LMCache; what lacks it is refused."""

from __future__ import annotations

import importlib
from typing import Any

from ttlcache.errors import ConfigError
from ttlcache_connector.log import logger
from ttlcache_lmcache import compat

#: Versions of vLLM that our tests run on.
TESTED_VLLM = ">=0.32,<0.34"
#: In vLLM's `additional_config`: TTLConnector is a child of a MultiConnector, which a
#: child's configuration does not name.
BESIDE_OTHERS = "ttlcache_beside_others"
_OVERRIDE = '"allow_untested_vllm": true in kv_connector_extra_config'

log = logger(__name__)


def vllm_version() -> str:
    """The version of the vllm module at hand, whatever its distribution is called."""
    return str(importlib.import_module("vllm").__version__)


def check_vllm(*, allow_untested: bool) -> str:
    """As `compat.check_tested`."""
    version, allow = vllm_version(), allow_untested
    return compat.check_tested(
        "vLLM", version, TESTED_VLLM, _OVERRIDE, allow=allow, log=log
    )


def check_lmcache_tier(*, allow_untested: bool) -> None:
    """As `compat.check_lmcache`; ConfigError where LMCache is not installed."""
    if compat.lmcache_version() is None:
        raise ConfigError(
            "key 'lower_tier' has value 'lmcache', expected: 'none' where LMCache is "
            "not installed; install vllm and lmcache>=0.5.6 in one pip command"
        )
    compat.check_lmcache(allow_untested=allow_untested, override=_OVERRIDE)


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


def mark_beside_others(vllm_config: Any) -> None:
    """Let TTLConnector know in the engine's processes that others are beside it."""
    is_alone = vllm_config.kv_transfer_config.kv_connector == "TTLConnector"
    if not is_alone and isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config[BESIDE_OTHERS] = True
