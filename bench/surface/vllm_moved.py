"""Names of vLLM that benches and tests use and that another version has elsewhere."""

from __future__ import annotations

import importlib
from typing import Any

#: Where to look, newest first.
_MODULES = {
    # 0.33, and before
    "get_kv_cache_config_from_groups": (
        "vllm.v1.core.kv_cache_planning",
        "vllm.v1.core.kv_cache_utils",
    ),
    "make_arg_parser": (
        "vllm.entrypoints.common.cli_args",
        "vllm.entrypoints.launchers.cli_args",
    ),
}


def find(name: str) -> Any:
    """
    Raises:
        AttributeError: it is in none of the modules known to have had it.
    """
    for module in _MODULES[name]:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise  # it is there, and lacks something else
            continue
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"{name} is in none of {_MODULES[name]}")
