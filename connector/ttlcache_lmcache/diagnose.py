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
from ttlcache_lmcache import compat, config
from ttlcache_lmcache.findings import BAD, OK, Finding
from ttlcache_lmcache.store import disk_index

#: LMCache's classes that each plugin derives from or calls, as "module:name".
_USED = {
    "server module": (
        "lmcache.v1.multiprocess.ext_server_module:server_module_handler",
        "lmcache.v1.distributed.internal_api:L1ManagerListener",
        "lmcache.v1.distributed.eviction_policy:NoOpEvictionPolicy",
        "lmcache.v1.mp_observability.event:EventType.MP_LOOKUP",
        "lmcache.v1.mp_observability.event:EventType.MP_REQUEST_END",
        "ttlcache_lmcache.server_module:build_server_modules",
    ),
    "L2 adapter": (
        "lmcache.v1.distributed.l2_adapters.plugin_l2_adapter:PluginL2AdapterConfig",
        "lmcache.v1.distributed.l2_adapters.base:L2AdapterInterface",
        "lmcache.v1.platform:create_event_notifier",
        "ttlcache_lmcache.l2_adapter:TTLL2Adapter",
    ),
    "storage plugin": (
        "lmcache.v1.storage_backend.abstract_backend:StoragePluginInterface",
        "ttlcache_lmcache.storage_plugin:TTLStoragePlugin",
    ),
}

SERVER_MODULE = "--server-module config"
L2_ADAPTER = "--l2-adapter adapter_params"
STORAGE_PLUGIN = "storage_plugins extra_config"

_SERVER_MODULE = ("ttlcache_lmcache.server_module", "build_server_modules")
_L2_ADAPTER = ("ttlcache_lmcache.l2_adapter", "TTLL2Adapter")
_STORAGE_CLASS = "TTLStoragePlugin"
#: LMCache's parsers, as "module:class".
_MODULE_SPEC = "lmcache.v1.multiprocess.ext_server_module:ExtServerModuleSpec"
_ADAPTER_SPEC = (
    "lmcache.v1.distributed.l2_adapters.plugin_l2_adapter:PluginL2AdapterConfig"
)
_YAML_SPEC = "lmcache.v1.config:LMCacheEngineConfig"


def diagnose(
    server_module: Mapping[str, Any] | None = None,
    l2_adapter: Mapping[str, Any] | None = None,
    storage_plugin: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Check the installation, and every configuration that is given.

    Args:
        server_module: `config` of `--server-module`.
        l2_adapter: `adapter_params` of `--l2-adapter`; its folder is locked for
            a moment, so a server that uses it is reported as such.
        storage_plugin: the in-process plugin's settings without their prefix; the
            folders that its workers have are locked as above.

    Returns:
        One finding a check, good ones included; nothing is raised.
    """
    given = (server_module, l2_adapter, storage_plugin)
    allow = any(raw.get("allow_untested_lmcache") is True for raw in given if raw)
    findings = [_version(allow)]
    if findings[0].state == BAD and compat.lmcache_version() is None:
        return findings
    findings += [_imports(plugin, names) for plugin, names in _USED.items()]
    if server_module is not None:
        findings.append(_attempt(_server_module, server_module, SERVER_MODULE))
    if l2_adapter is not None:
        findings.append(_attempt(_tier, l2_adapter, L2_ADAPTER))
    if storage_plugin is not None:
        findings.append(_attempt(_workers, storage_plugin, STORAGE_PLUGIN))
    return findings


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
        return [*diagnose(), Finding(BAD, what, str(error))]
    except Exception as error:  # noqa: BLE001 - LMCache's parsers raise anything
        reason = f"LMCache refuses it: {type(error).__name__}: {error}"
        return [*diagnose(), Finding(BAD, what, reason)]
    return diagnose(**chosen)


def _version(allow_untested: bool) -> Finding:
    try:
        version = compat.check_lmcache(allow_untested=allow_untested)
    except TTLCacheError as error:
        return Finding(BAD, "LMCache version", str(error))
    is_tested = compat.is_in(version, compat.TESTED_LMCACHE)
    tested = "tested" if is_tested else "not tested, but allowed"
    return Finding(OK, "LMCache version", f"{version}, {tested}")


def _imports(plugin: str, names: tuple[str, ...]) -> Finding:
    for name in names:
        try:
            _found(name)
        except Exception as error:  # noqa: BLE001 - any reason not to load is one
            return Finding(BAD, plugin, f"{name}: {type(error).__name__}: {error}")
    return Finding(OK, plugin, "loads")


def _found(name: str) -> Any:
    """What a "module:name" names."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _attempt(
    check: Callable[[Mapping[str, Any], str], str], raw: Mapping[str, Any], where: str
) -> Finding:
    try:
        return Finding(OK, where, check(raw, where))
    except TTLCacheError as error:
        return Finding(BAD, where, str(error).removeprefix(f"{where}: "))


def _server_module(raw: Mapping[str, Any], where: str) -> str:
    found = config.load(config.ServerModuleConfig, raw, where)
    return f"max_ttl_s={found.max_ttl_s:g}"


def _tier(raw: Mapping[str, Any], where: str) -> str:
    found = config.load(config.TierConfig, raw, where)
    _check_folder(Path(found.path))
    return f"{_sizes(found)}; the folder can be used"


def _workers(raw: Mapping[str, Any], where: str) -> str:
    found = config.load(config.TierConfig, raw, where)
    folder = Path(found.path)
    # How many workers there will be is not known here: those that there were, and one.
    for each in sorted({*folder.glob("worker-[0-9]*"), folder / "worker-0"}):
        _check_folder(each)
    return f"{_sizes(found)}, for every worker; the folders can be used"


def _sizes(found: config.TierConfig) -> str:
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


def _from_json(text: str) -> dict[str, Mapping[str, Any]]:
    spec = json.loads(text)
    if "type" in spec:
        return {"l2_adapter": _adapter_params(spec)}
    parsed = _found(_MODULE_SPEC).from_dict(spec)
    found = (parsed.module_path, parsed.factory_name)
    if found != _SERVER_MODULE:
        raise ConfigError(
            f"module_path and factory are {found!r}, expected: {_SERVER_MODULE!r}; for "
            'an L2 adapter give "type": "plugin"'
        )
    return {"server_module": parsed.config}


def _adapter_params(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    if spec["type"] != "plugin":
        raise ConfigError(f"type is {spec['type']!r}, expected: 'plugin'")
    parsed = _found(_ADAPTER_SPEC).from_dict(dict(spec))
    found = (parsed.module_path, parsed.class_name)
    if found != _L2_ADAPTER:
        raise ConfigError(
            f"module_path and class_name are {found!r}, expected: {_L2_ADAPTER!r}"
        )
    params: Mapping[str, Any] = parsed.adapter_params
    return params


def _from_yaml(path: str) -> dict[str, Mapping[str, Any]]:
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file")
    given = _found(_YAML_SPEC).from_file(path)
    settings_of = _found("ttlcache_lmcache.storage_plugin:settings_of")
    prefix, settings = settings_of(given.extra_config)
    name = prefix.removeprefix("storage_plugin.")
    if name not in (given.storage_plugins or ()):
        raise ConfigError(
            f"storage_plugins is {given.storage_plugins!r}, expected: {name!r} in it; "
            "LMCache would not load the plugin"
        )
    class_name = given.extra_config.get(f"{prefix}.class_name")
    if class_name != _STORAGE_CLASS:
        raise ConfigError(
            f"{prefix}.class_name is {class_name!r}, expected: {_STORAGE_CLASS!r}"
        )
    compat.check_hash(given)
    return {"storage_plugin": settings}
