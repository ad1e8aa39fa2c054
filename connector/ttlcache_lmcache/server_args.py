"""What a person gives to LMCache, checked as it is given.

The JSON of `--server-module` or `--l2-adapter`, or an `lmcache.yaml` whose
`storage_plugins` name ours: read by LMCache's own parsers, then by `diagnose`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttlcache.errors import ConfigError, TTLCacheError
from ttlcache_lmcache import compat
from ttlcache_lmcache.diagnose import Finding, diagnose

SERVER_MODULE = "ttlcache_lmcache.server_module"
L2_ADAPTER = ("ttlcache_lmcache.l2_adapter", "TTLL2Adapter")
STORAGE_CLASS = "TTLStoragePlugin"
#: LMCache's parsers, as (module, name of the class).
_MODULE_SPEC = ("lmcache.v1.multiprocess.ext_server_module", "ExtServerModuleSpec")
_ADAPTER_SPEC = (
    "lmcache.v1.distributed.l2_adapters.plugin_l2_adapter",
    "PluginL2AdapterConfig",
)
_YAML_SPEC = ("lmcache.v1.config", "LMCacheEngineConfig")


def is_given(text: str) -> bool:
    """Whether this is something to check, and no address."""
    return text.lstrip().startswith("{") or text.endswith((".yaml", ".yml"))


def diagnose_given(text: str) -> list[Finding]:
    """The installation, and whether LMCache would load what `text` asks for.

    Args:
        text: the value of one flag, or the path of an `lmcache.yaml`.

    Returns:
        As `diagnose`; what cannot be read is a bad finding of its own.
    """
    what = "JSON" if text.lstrip().startswith("{") else text
    if compat.lmcache_version() is None:
        return diagnose()
    try:
        chosen = _from_json(text) if what == "JSON" else _from_yaml(text)
    except TTLCacheError as error:
        return [*diagnose(), Finding(what, False, str(error))]
    except Exception as error:  # noqa: BLE001 - LMCache's parsers raise anything
        reason = f"LMCache refuses it: {type(error).__name__}: {error}"
        return [*diagnose(), Finding(what, False, reason)]
    return diagnose(**chosen)


def _from_json(text: str) -> dict[str, Mapping[str, Any]]:
    spec = json.loads(text)
    if "type" in spec:
        return {"l2_adapter": _adapter_params(spec)}
    parsed = _lmcaches(_MODULE_SPEC).from_dict(spec)
    if (parsed.module_path, parsed.factory_name) != (
        SERVER_MODULE,
        "build_server_modules",
    ):
        raise ConfigError(
            f"module_path is {parsed.module_path!r} (factory {parsed.factory_name!r}), "
            f"expected: {SERVER_MODULE!r} with its default factory; for an L2 adapter "
            'give "type": "plugin"'
        )
    return {"server_module": parsed.config}


def _adapter_params(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    if spec["type"] != "plugin":
        raise ConfigError(f"type is {spec['type']!r}, expected: 'plugin'")
    parsed = _lmcaches(_ADAPTER_SPEC).from_dict(dict(spec))
    found = (parsed.module_path, parsed.class_name)
    if found != L2_ADAPTER:
        raise ConfigError(
            f"module_path and class_name are {found!r}, expected: {L2_ADAPTER!r}"
        )
    params: Mapping[str, Any] = parsed.adapter_params
    return params


def _from_yaml(path: str) -> dict[str, Mapping[str, Any]]:
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file")
    config = _lmcaches(_YAML_SPEC).from_file(path)
    settings_of = importlib.import_module("ttlcache_lmcache.storage_plugin").settings_of
    prefix, settings = settings_of(config.extra_config)
    name = prefix.removeprefix("storage_plugin.")
    if name not in (config.storage_plugins or ()):
        raise ConfigError(
            f"storage_plugins is {config.storage_plugins!r}, expected: {name!r} in it; "
            "LMCache would not load the plugin"
        )
    class_name = config.extra_config.get(f"{prefix}.class_name")
    if class_name != STORAGE_CLASS:
        raise ConfigError(
            f"{prefix}.class_name is {class_name!r}, expected: {STORAGE_CLASS!r}"
        )
    compat.check_hash(config)
    return {"storage_plugin": settings}


def _lmcaches(place: tuple[str, str]) -> Any:
    return getattr(importlib.import_module(place[0]), place[1])
