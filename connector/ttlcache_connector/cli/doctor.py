"""`ttlcache doctor`: what is installed here, and what will be used."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ttlcache.cli.common import ApiKey, key_headers
from ttlcache.cli.live import engines_of, reason
from ttlcache.config import (
    TTLCacheConfig,
    admission_in_force,
    load_config,
    ordering_in_force,
)
from ttlcache.errors import ConfigError, TTLCacheError
from ttlcache_connector import plugin
from ttlcache_connector.cli import doctor_template
from ttlcache_connector.cli.doctor_template import BAD, NOTE, OK, Finding
from ttlcache_connector.engine import requirements
from ttlcache_lmcache import compat

_STYLE = {OK: "green", NOTE: "yellow", BAD: "bold red"}


def doctor(
    config: Annotated[
        str | None,
        typer.Option(help="JSON: the kv_connector_extra_config to be used."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Also ask this running vLLM server, and show its settings."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or name of the model: look at its chat template."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Look at this one, as vLLM's --chat-template.")
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Check this machine and say what will be used, and why."""
    console = Console()
    found = list(findings(config, url, api_key, model, chat_template))
    grid = Table(title="ttlcache doctor", title_justify="left")
    for name in ("", "", ""):
        grid.add_column(name, overflow="fold")
    for finding in found:
        state = f"[{_STYLE[finding.state]}]{finding.state}[/]"
        grid.add_row(state, finding.what, escape(finding.text))
    console.print(grid)
    raise typer.Exit(1 if any(f.state == BAD for f in found) else 0)


def findings(
    config: str | None,
    url: str | None = None,
    api_key: str | None = None,
    model: str | None = None,
    chat_template: Path | None = None,
) -> Iterator[Finding]:
    """Everything that is worth knowing, one after the other.

    Args:
        config: settings to be judged; None: the defaults, or the server's own at `url`.
    """
    yield Finding(OK, "python", f"{platform.python_version()}, {platform.machine()}")
    yield Finding(OK, "ttlcache", compat.ttlcache_version())
    settings = None
    try:
        if config is not None or url is None:
            settings = load_config(_object(config or "{}"))
    except ConfigError as error:
        yield Finding(BAD, "configuration", str(error))
    has_vllm = _has_vllm()
    if has_vllm:
        yield _guess("vllm", lambda: _vllm(settings))
        yield _guess("plugin", _plugin)
    else:
        yield Finding(BAD, "vllm", "not installed: TTLConnector cannot run here")
    if settings is not None:
        if has_vllm and settings.lower_tier == "auto":
            from ttlcache_connector.tiers.cpu.tier import tier_on_this_machine

            tier = tier_on_this_machine(settings)
            settings = settings.model_copy(update={"lower_tier": tier})
        yield from _settings(settings)
    if has_vllm:
        yield _guess("GPU", _gpu)
    if has_vllm and settings is not None and settings.has_lower_tier:
        yield _guess("lower tier", lambda: _lower_tier(settings))
    yield from doctor_template.findings(model, chat_template)
    if url is not None:
        yield from _server(url, api_key)


def _object(config: str) -> dict[str, Any]:
    """
    Raises:
        ConfigError: something else, or more, than `kv_connector_extra_config`.
    """
    try:
        content = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{config!r}, expected: a JSON object ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{config!r}, expected: a JSON object")
    if "kv_connector" in content:
        raise ConfigError(
            "all of --kv-transfer-config, expected: its kv_connector_extra_config alone"
        )
    return content


def _has_vllm() -> bool:
    try:
        return importlib.util.find_spec("vllm") is not None
    except (ImportError, ValueError):
        return False


def _vllm(settings: TTLCacheConfig | None) -> Finding:
    allow = settings is not None and settings.allow_untested_vllm
    version = requirements.check_vllm(allow_untested=allow)
    return Finding(OK, "vllm", f"{version} (tested: {requirements.TESTED_VLLM})")


def _plugin() -> Finding:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(point.name == "ttlcache" for point in points):
        text = "vLLM does not find our plugin: is ttlcache installed where vLLM is?"
        return Finding(BAD, "plugin", text)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "ttlcache" not in allowed.split(","):
        text = f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading it: add ttlcache"
        return Finding(BAD, "plugin", text)
    plugin.register()
    factory = importlib.import_module(
        "vllm.distributed.kv_transfer.kv_connector.factory"
    ).KVConnectorFactory
    cls = factory.get_connector_class_by_name(plugin.CONNECTOR)
    return Finding(OK, "plugin", f"{plugin.CONNECTOR} is {cls.__module__}")


def _settings(settings: TTLCacheConfig) -> Iterator[Finding]:
    auto = {"ordering": ordering_in_force(settings)}
    auto["admission"] = admission_in_force(settings)
    yield Finding(OK, "policy", _policy(settings.model_dump() | auto))
    if settings.record_path is None:
        yield Finding(NOTE, "record_path", "not set: nothing to explain")
    else:
        yield _writable("record_path", Path(settings.record_path))


def _policy(settings: Mapping[str, Any]) -> str:
    options = f" {settings['policy_options']}" if settings["policy_options"] else ""
    by = f"ordering {settings['ordering']}, admission {settings['admission']}"
    return f"{settings['policy']}{options}, {by}"


def _writable(name: str, folder: Path) -> Finding:
    """A folder that is not there is made."""
    existing = folder
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if existing.is_dir() and os.access(existing, os.W_OK):
            return Finding(OK, name, str(folder))
        why = "cannot be written" if existing.exists() else "is not there"
    except (OSError, ValueError) as error:
        why = f"cannot be used ({error})"
    return Finding(BAD, name, f"{folder} {why}")


def _gpu() -> Finding:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        text = "none: vLLM's CPU backend, pins live in host memory"
        return Finding(NOTE, "GPU", text)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cupy = "CuPy" if importlib.util.find_spec("cupy") else "no CuPy: no CPU tier"
    return Finding(OK, "GPU", f"{', '.join(names)}; {cupy}")


def _lower_tier(settings: TTLCacheConfig) -> Finding:
    from ttlcache_connector.tiers.cpu.budget import available_bytes
    from ttlcache_connector.tiers.registry import TIERS  # only where vLLM is

    kind = settings.lower_tier
    TIERS[kind].check(settings)
    size = f"{settings.cpu_gb:g} GB" if settings.cpu_gb else "of its default size"
    if kind != "cpu":
        return Finding(OK, "lower tier", f"{kind} {compat.lmcache_version()}")
    free_gb = available_bytes() / 1e9
    if (settings.cpu_gb or 0.0) > free_gb:
        less = f"{free_gb:.3g} GB available here, it would start without"
        return Finding(BAD, "lower tier", f"{kind} {size}: {less}")
    return Finding(OK, "lower tier", f"{kind} {size}")


def _server(url: str, api_key: str | None) -> Iterator[Finding]:
    headers = key_headers(api_key)
    try:
        with httpx.Client(base_url=url, timeout=10.0, headers=headers) as http:
            metrics = http.get("/metrics").text
            live = http.get("/ttlcache/programs")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        yield Finding(BAD, "server", f"{url}: {reason(error)}")
        return
    if "ttlcache_pool_blocks" not in metrics:
        is_vllm = "vllm:" in metrics
        what = "runs without TTLConnector" if is_vllm else "is not vLLM's API server"
        yield Finding(BAD, "server", f"{url} {what}")
        return
    caching = 'enable_prefix_caching="False"' not in metrics
    yield Finding(OK if caching else BAD, "server", f"{url}, prefix caching {caching}")
    if live.status_code != 200:
        yield Finding(NOTE, "server", f"/ttlcache/programs: {live.status_code}")
        return
    try:
        engines = engines_of(live)
    except ValueError as error:
        yield Finding(BAD, "server", str(error))
        return
    if engines and engines[0].get("settings"):  # all engines of a server have the same
        yield from _server_settings(engines[0]["settings"])
    for engine in engines:
        gauges = engine.get("gauges", {})
        on = gauges.get("retention_enabled", 0.0)
        text = "is on" if on else "has turned itself off: see its log"
        yield Finding(OK if on else BAD, "server", f"retention {text}")
        if engine.get("settings", {}).get("lower_tier", "none") != "none":
            up = gauges.get("tier_up", 0.0)
            text = "answers" if up else "does not answer: what pins lose is prefilled"
            yield Finding(OK if up else BAD, "server's tier", text)


def _server_settings(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """As the server has them; it may be of another version."""
    known = TTLCacheConfig(lower_tier="none").model_dump()
    versions = f"{settings.get('ttlcache')} on vLLM {settings.get('vllm')}"
    yield Finding(OK, "server's ttlcache", versions)
    yield Finding(OK, "server's policy", _policy({**known, **settings}))
    shown = ("policy", "policy_options", "ordering", "admission")
    others = {n: v for n, v in settings.items() if n in known and n not in shown}
    changed = [f"{n}: {json.dumps(v)}" for n, v in others.items() if v != known[n]]
    text = ", ".join(changed) or "the defaults"
    yield Finding(OK, "server's settings", text)
    if settings.get("record_path") is None:
        yield Finding(NOTE, "server's record_path", "not set: nothing to explain")


def _guess(what: str, look: Callable[[], Finding]) -> Finding:
    """A check that itself may fail on machines we have not seen."""
    try:
        return look()
    except TTLCacheError as error:
        return Finding(BAD, what, str(error))
    except Exception as error:  # noqa: BLE001 - a doctor must not die of a patient
        return Finding(BAD, what, f"{type(error).__name__}: {error}")
