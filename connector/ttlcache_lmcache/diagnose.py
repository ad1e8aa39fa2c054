"""Would the plugins load, and why not: what `ttlcache doctor --lmcache` can ask.

Checked as a person gives it to LMCache: the JSON of `--server-module` or
`--l2-adapter`, or an `lmcache.yaml` whose `storage_plugins` name ours; by LMCache's own
parsers. Imports nothing of LMCache at the top: it must run where that is missing.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ttlcache.errors import ConfigError, TTLCacheError
from ttlcache_lmcache import compat
from ttlcache_lmcache.config import (
    L2_ADAPTER,
    SERVER_MODULE,
    ServerModuleConfig,
    TierConfig,
    load,
)
from ttlcache_lmcache.findings import BAD, OK, Finding
from ttlcache_lmcache.store import disk_index

#: LMCache's parsers, as "module:class".
_MODULE_SPEC = "lmcache.v1.multiprocess.ext_server_module:ExtServerModuleSpec"
_ADAPTER_SPEC = (
    "lmcache.v1.distributed.l2_adapters.plugin_l2_adapter:PluginL2AdapterConfig"
)
_YAML_SPEC = "lmcache.v1.config:LMCacheEngineConfig"

_PLUGINS = {
    "server module": "ttlcache_lmcache.server_module:build_server_modules",
    "L2 adapter": "ttlcache_lmcache.l2_adapter:TTLL2Adapter",
    "storage plugin": "ttlcache_lmcache.storage_plugin:TTLStoragePlugin",
}

STORAGE_PLUGIN = "storage_plugins extra_config"
_Settings = Mapping[str, Any]


def is_given(text: str) -> bool:
    """Whether this is something to check, and no address."""
    return text.lstrip().startswith("{") or text.endswith((".yaml", ".yml"))


def diagnose(given: str | None = None) -> list[Finding]:
    """Check the installation, and whether LMCache would load what is given.

    Args:
        given: the value of one flag, or the path of an `lmcache.yaml`. The folders
            that it names are locked for a moment, so a process that uses one is
            reported as such.

    Returns:
        One finding a check, good ones included; nothing is raised.
    """
    if given is None or compat.lmcache_version() is None:
        return _installation(allow_untested=False)
    where, allow = "JSON" if given.lstrip().startswith("{") else given, False
    try:
        read = _from_json if where == "JSON" else _from_yaml
        where, settings = read(given)
        allow = settings.get("allow_untested_lmcache") is True
        found = Finding(OK, where, _CHECKS[where](settings))
    except TTLCacheError as error:
        found = Finding(BAD, where, str(error).removeprefix(f"{where}: "))
    except Exception as error:  # noqa: BLE001 - LMCache's parsers raise anything
        reason = f"LMCache refuses it: {type(error).__name__}: {error}"
        found = Finding(BAD, where, reason)
    return [*_installation(allow_untested=allow), found]


def _installation(*, allow_untested: bool) -> list[Finding]:
    try:
        version = compat.check_lmcache(allow_untested=allow_untested)
    except TTLCacheError as error:
        version_found = Finding(BAD, "LMCache version", str(error))
        if compat.lmcache_version() is None:
            return [version_found]
    else:
        is_tested = compat.is_in(version, compat.TESTED_LMCACHE)
        tested = "tested" if is_tested else "not tested, but allowed"
        version_found = Finding(OK, "LMCache version", f"{version}, {tested}")
    return [version_found, *(_imports(*plugin) for plugin in _PLUGINS.items())]


def _imports(plugin: str, name: str) -> Finding:
    try:
        _found(name)
    except Exception as error:  # noqa: BLE001 - any reason not to load is one
        return Finding(BAD, plugin, f"{name}: {type(error).__name__}: {error}")
    return Finding(OK, plugin, "loads")


def _found(name: str) -> Any:
    """What a "module:name" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _server_module(raw: _Settings) -> str:
    return f"max_ttl_s={load(ServerModuleConfig, raw, SERVER_MODULE).max_ttl_s:g}"


def _adapter(raw: _Settings) -> str:
    found = load(TierConfig, raw, L2_ADAPTER)
    _check_folder(Path(found.path))
    return f"{_sizes(found)}; the folder can be used"


def _workers(raw: _Settings) -> str:
    found = load(TierConfig, raw, STORAGE_PLUGIN)
    folder = Path(found.path)
    # How many workers there will be is not known here: those that there were, and one.
    for each in sorted({*folder.glob("worker-[0-9]*"), folder / "worker-0"}):
        _check_folder(each)
    return f"{_sizes(found)}, for every worker; the folders can be used"


_CHECKS: dict[str, Callable[[_Settings], str]] = {
    SERVER_MODULE: _server_module,
    L2_ADAPTER: _adapter,
    STORAGE_PLUGIN: _workers,
}


def _sizes(found: TierConfig) -> str:
    return f"{found.disk_bytes} bytes on disk, {found.memory_bytes} in memory"


def _check_folder(folder: Path) -> None:
    """As the plugin will; but a folder that is not there yet is not made.

    Raises:
        ConfigError: not a folder, not writable, or another process has it.
    """
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if place == folder:
        disk_index.unlock_folder(disk_index.lock_folder(folder))
    elif not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"key 'path' has value {str(folder)!r}, expected: a writable folder "
            f"({place} cannot be written)"
        )


def _from_json(text: str) -> tuple[str, _Settings]:
    """What the flag configures, and its settings."""
    spec = json.loads(text)
    if "type" not in spec:
        parsed = _found(_MODULE_SPEC).from_dict(spec)
        found = {"module_path": parsed.module_path, "factory": parsed.factory_name}
        _expect(found, "ttlcache_lmcache.server_module", "build_server_modules")
        return SERVER_MODULE, parsed.config
    _expect({"type": spec["type"]}, "plugin")
    parsed = _found(_ADAPTER_SPEC).from_dict(spec)
    found = {"module_path": parsed.module_path, "class_name": parsed.class_name}
    _expect(found, "ttlcache_lmcache.l2_adapter", "TTLL2Adapter")
    return L2_ADAPTER, parsed.adapter_params


def _from_yaml(path: str) -> tuple[str, _Settings]:
    """As `_from_json`, of the one of `storage_plugins` that is ours."""
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file")
    given = _found(_YAML_SPEC).from_file(path)
    settings_of = _found("ttlcache_lmcache.storage_plugin:settings_of")
    prefix, settings = settings_of(given)
    name = prefix.removeprefix("storage_plugin.")
    if name not in (given.storage_plugins or ()):
        raise ConfigError(
            f"storage_plugins is {given.storage_plugins!r}, expected: {name!r} in it; "
            "LMCache would not load the plugin"
        )
    key = f"{prefix}.class_name"
    _expect({key: given.extra_config.get(key)}, "TTLStoragePlugin")
    return STORAGE_PLUGIN, settings


def _expect(found: Mapping[str, object], *expected: str) -> None:
    for (name, value), wanted in zip(found.items(), expected, strict=True):
        if value != wanted:
            raise ConfigError(f"{name} is {value!r}, expected: {wanted!r}")
