"""Where an engine records."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from ttlcache.clock import Clock, wall_s
from ttlcache.config import TTLCacheConfig
from ttlcache.errors import ConfigError
from ttlcache.telemetry.events import Telemetry
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.telemetry.recorder import Recorder


def check(config: TTLCacheConfig) -> None:
    """What an engine would refuse after its model is loaded.

    Raises:
        ConfigError: `record_path` cannot be used.
    """
    if config.record_path is None:
        return
    folder = Path(config.record_path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK)
    except (OSError, ValueError) as error:
        raise _no_record_path(config, error) from None
    if not is_writable:
        raise _no_record_path(config, "not writable")


def open_telemetry(
    config: TTLCacheConfig,
    clock: Clock,
    metrics: MetricsBuffer,
    about: dict[str, Any],
) -> Telemetry:
    """Records into `record_path` where that is set.

    Args:
        about: facts about the engine for the head of the recording.

    Raises:
        ConfigError: the folder cannot be written.
    """
    if config.record_path is None:
        return Telemetry(metrics)
    now_s, date_s = clock.now_s(), wall_s()
    header = {
        "wall_minus_clock_s": date_s - now_s,
        "policy": config.policy,
        "config": config.model_dump(),
        **about,
    }
    try:
        # Engines in containers may share the folder, and have the same number.
        run = f"{int(date_s)}-{os.getpid()}-{secrets.token_hex(2)}"
        recorder = Recorder(Path(config.record_path), header, run=run)
    except OSError as error:
        raise _no_record_path(config, error) from None
    return Telemetry(metrics, recorder)


def _no_record_path(config: TTLCacheConfig, why: object) -> ConfigError:
    return ConfigError(
        f"key 'record_path' has value {config.record_path!r}, expected: a folder that "
        f"can be written ({why})"
    )
