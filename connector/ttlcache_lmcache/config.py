"""Settings of the plugins: frozen, checked at start, unknown keys refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ttlcache.errors import ConfigError, explain

#: What users write the settings under.
SERVER_MODULE = "--server-module config"
L2_ADAPTER = "--l2-adapter adapter_params"
_Settings = TypeVar("_Settings", bound="PluginConfig")


class PluginConfig(BaseModel):
    """What all plugins share."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    allow_untested_lmcache: bool = Field(
        default=False, description="Run on LMCache versions outside the tested range."
    )


class ServerModuleConfig(PluginConfig):
    """`config` of `--server-module`."""

    max_ttl_s: float = Field(
        default=600.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Upper bound of clients' TTLs in seconds.",
    )
    program_idle_s: float = Field(
        default=3600.0,
        gt=0.0,
        allow_inf_nan=False,
        description="A program silent for this long counts as ended.",
    )
    max_programs: int = Field(
        default=100_000,
        ge=1,
        description="Programs remembered at once; the longest idle is forgotten.",
    )


class DiskConfig(PluginConfig):
    """The L2 adapter's parameters."""

    path: str = Field(min_length=1, description="Folder of the disk tier.")
    disk_bytes: int = Field(gt=0, description="Most bytes of files.")
    disk_ttl_s: float = Field(
        default=86_400.0,
        gt=0.0,
        description="Seconds since the last use after which it is removed for good.",
    )
    num_threads: int = Field(
        default=4, ge=1, le=64, description="Threads that store, and as many that load."
    )


def load(kind: type[_Settings], raw: Mapping[str, Any], where: str) -> _Settings:
    """Validate a plugin's settings.

    Args:
        where: what the user wrote it under, for the error text.

    Raises:
        ConfigError: unknown key (with the nearest valid one), wrong type or range,
            missing key.
    """
    try:
        return kind.model_validate(dict(raw))
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(kind, error)}") from None
