"""The commands that README and docs tell people to type."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
_BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
_INLINE = re.compile(r"`(?:python -m )?bench ([^`]+)`")
LIVE = "http://localhost:8000"


@dataclass(frozen=True, slots=True)
class Command:
    """One line of a bash block."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def asks_a_server(self) -> bool:
        return "localhost:8000" in self.text and self.words[0] in ("curl", "ttlcache")


def commands() -> list[Command]:
    """All of them, without comments, continued lines joined."""
    found = []
    for page in PAGES:
        for block in _BLOCK.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip() and not line.lstrip().startswith("#"):
                    found.append(Command(page.name, line.strip()))
    return found


def of_recordings() -> list[Command]:
    """`ttlcache` commands that need no server and no model."""
    return [
        command
        for command in commands()
        if command.words[0] == "ttlcache"
        and command.words[1] not in ("profile", "doctor", "serve-tiers", "front")
        and not command.asks_a_server
    ]


def of_doctors() -> list[Command]:
    """`ttlcache doctor` without a running server."""
    return [
        command
        for command in commands()
        if command.words[:2] == ["ttlcache", "doctor"] and not command.asks_a_server
    ]


def of_servers() -> list[Command]:
    """Commands that talk to a running server."""
    return [command for command in commands() if command.asks_a_server]


def of_fleets() -> list[Command]:
    """Commands that start or ask a router and what stands before it."""
    return [
        command
        for command in commands()
        if command.words[0] == "vllm-router"
        or command.words[:2] == ["ttlcache", "front"]
        or (command.words[0] == "curl" and "127.0.0.1:30000" in command.text)
    ]


def of_benches() -> list[Command]:
    """`bench …`, in blocks of their own and in running text, as its arguments only."""
    blocks = [
        Command(command.page, command.text.removeprefix("python -m bench "))
        for command in commands()
        if command.text.startswith("python -m bench ")
    ]
    inline = [
        Command(page.name, " ".join(text.split()))
        for page in [*PAGES, ROOT / "bench" / "README.md"]
        for text in _INLINE.findall(page.read_text())
    ]
    unique = {command.text: command for command in [*blocks, *inline]}
    return [c for c in unique.values() if c.text not in ("…", "--help")]
