"""Commands whose code needs vLLM: only their signatures are here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from ttlcache.cli.common import ApiKey, fail


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
    try:
        command = importlib.import_module("ttlcache_connector.cli.doctor")
    except ImportError as error:
        fail(f"{error}: this command needs vLLM beside ttlcache")
    command.run(config, url, api_key, model, chat_template)


def command_of(module: str, name: str) -> Any:
    """A command of another package that can show its options without vLLM."""
    return getattr(importlib.import_module(module), name)
