"""`python -m bench settings`: arms as they are named on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.compare.agents import CONNECTOR, LMCACHE, ComparisonOptions
from bench.compare.measure import Settings, measure
from ttlcache.cli.command import json_object, option

#: In place of a setting: vLLM without a connector, and with LMCache's.
VANILLA, PLAIN_LMCACHE = "vanilla", "lmcache"


@dataclass(frozen=True, slots=True)
class SettingsOptions(ComparisonOptions):
    """`with_`: the texts of the arms, see `parse`."""

    with_: list[str] = option(
        [],
        "A JSON object: TTLConnector with this kv_connector_extra_config; "
        "vanilla: no connector; lmcache, or lmcache:{...}: LMCache's own connector "
        "and its configuration. Say it twice or more; the first one is what the "
        "others are compared with. Each arm above LMCache has its own server.",
        "--with",
    )
    rounds: int = option(3, "How often each.", min=1)
    programs: int = 24
    blocks: int = 768
    at_once: int | None = option(
        None, "So many agents at a time; --rate counts no more.", min=1
    )
    hints: bool = option(True, "Agents say program, tool and last step.")
    cpu_gb: float = option(1.5, "CPU memory of each LMCache server, GiB.")
    chunk_tokens: int = option(
        32, "Tokens of an LMCache chunk, a multiple of 32.", min=32
    )
    out: Path = Path("out/settings")

    def __post_init__(self) -> None:
        parse(self.with_)


def parse(texts: Sequence[str]) -> Settings:
    """Arms from JSON objects, `VANILLA`, or `PLAIN_LMCACHE` with ":{...}" or without.

    Raises:
        ValueError: fewer than two, the same one twice, no JSON object.
    """
    if len(texts) < 2:
        raise ValueError("give --with at least twice: settings are compared")
    found: dict[str, Mapping[str, Any] | None] = {}
    for text in texts:
        if text in found:
            raise ValueError(f"--with {text}: given twice")
        found[text] = _transfer_config(text)
    return found


def settings(options: SettingsOptions, console: Console) -> int:
    """Connectors and settings against each other on real vLLM, round by round."""
    return measure(options, parse(options.with_), console)[1]


def _transfer_config(text: str) -> Mapping[str, Any] | None:
    if text == VANILLA:
        return None
    name, _, rest = text.partition(":")
    connector, part = CONNECTOR, text
    if name == PLAIN_LMCACHE:
        connector, part = LMCACHE, rest or "{}"
    try:
        extra = json_object(f"--with {text}", part)
    except ValueError as error:
        expected = f"expected a JSON object, {VANILLA}, or {PLAIN_LMCACHE}"
        raise ValueError(f"{error}; {expected}") from None
    return {**connector, "kv_connector_extra_config": extra}
