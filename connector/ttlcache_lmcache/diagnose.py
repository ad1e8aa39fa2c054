"""Would the plugins load, and why not: what `ttlcache doctor --lmcache` can ask.

Imports nothing of LMCache at the top: it must run where LMCache is missing.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlcache.errors import ConfigError, TTLCacheError
from ttlcache_lmcache import compat, config
from ttlcache_lmcache.store import disk_index

#: LMCache's classes that each plugin derives from or calls, as "module:name".
_USED = {
    "server module": (
        "lmcache.v1.multiprocess.ext_server_module:server_module_handler",
        "lmcache.v1.distributed.internal_api:L1ManagerListener",
        "lmcache.v1.distributed.eviction:EvictionPolicy",
        "lmcache.v1.distributed.storage_manager:StorageManager.register_l2_listener",
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


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was looked at, whether it is well, and what was found."""

    what: str
    is_ok: bool
    text: str


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
    if not findings[0].is_ok and compat.lmcache_version() is None:
        return findings
    findings += [_imports(plugin, names) for plugin, names in _USED.items()]
    if server_module is not None:
        findings.append(_attempt(_server_module, server_module, SERVER_MODULE))
    if l2_adapter is not None:
        findings.append(_attempt(_tier, l2_adapter, L2_ADAPTER))
    if storage_plugin is not None:
        findings.append(_attempt(_workers, storage_plugin, STORAGE_PLUGIN))
    return findings


def _version(allow_untested: bool) -> Finding:
    try:
        version = compat.check_lmcache(allow_untested=allow_untested)
    except TTLCacheError as error:
        return Finding("LMCache version", False, str(error))
    tested = "tested" if compat.is_tested(version) else "not tested, but allowed"
    return Finding("LMCache version", True, f"{version}, {tested}")


def _imports(plugin: str, names: tuple[str, ...]) -> Finding:
    for name in names:
        module, _, path = name.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except Exception as error:  # noqa: BLE001 - any reason not to load is one
            return Finding(plugin, False, f"{name}: {type(error).__name__}: {error}")
    return Finding(plugin, True, "loads")


def _attempt(
    check: Callable[[Mapping[str, Any], str], str], raw: Mapping[str, Any], where: str
) -> Finding:
    try:
        return Finding(where, True, check(raw, where))
    except TTLCacheError as error:
        return Finding(where, False, str(error).removeprefix(f"{where}: "))


def _server_module(raw: Mapping[str, Any], where: str) -> str:
    found = config.load(config.ServerModuleConfig, raw, where)
    return f"policy={found.policy} max_ttl_s={found.max_ttl_s:g}"


def _tier(raw: Mapping[str, Any], where: str) -> str:
    found = config.load(config.TierConfig, raw, where)
    _check_folder(Path(found.path))
    return f"{_sizes(found)}; the folder can be used"


def _workers(raw: Mapping[str, Any], where: str) -> str:
    found = config.load(config.StoragePluginConfig, raw, where)
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
