"""The commands that README and docs tell people to type."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ttlcache_connector.http.known_clients import FINAL_HEADERS, HEADER_FORMS

#: Every header that says something of a program.
HEADER_NAMES = {name for f in HEADER_FORMS for name in (f.session, f.agent, f.parent)}
HEADER_NAMES = HEADER_NAMES - {None} | {*FINAL_HEADERS}
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
_BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
_INLINE = re.compile(r"`(?:python -m )?bench ([^`]+)`")
_OF_TTLCACHE = {
    "estimate": "estimate",
    "front": "fleet",
    "profile": "profile",
    "serve-tiers": "tiers",
}


@dataclass(frozen=True, slots=True)
class Command:
    """One line of a bash block."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def kind(self) -> str:
        """What it runs on: a server, a fleet, a recording; else its first word."""
        program = self.words[0]
        if "localhost:8000" in self.text and program in ("curl", "ttlcache"):
            return "server"
        if program == "curl" and "127.0.0.1:30000" in self.text:
            return "fleet"
        if program == "ttlcache":
            return _OF_TTLCACHE.get(self.words[1], "recording")
        return "fleet" if program == "vllm-router" else program


def commands(kind: str = "") -> list[Command]:
    """All, or those of a kind, without comments, continued lines joined."""
    found = []
    for page in PAGES:
        for block in _BLOCK.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip() and not line.lstrip().startswith("#"):
                    found.append(Command(page.name, line.strip()))
    return [command for command in found if kind in ("", command.kind)]


def of_benches() -> list[Command]:
    """`bench …`, in blocks of their own and in running text, as its arguments only."""
    blocks = [
        Command(command.page, command.text.removeprefix("python -m bench "))
        for command in commands("python")
        if command.text.startswith("python -m bench ")
    ]
    inline = [
        Command(page.name, " ".join(text.split()))
        for page in [*PAGES, ROOT / "bench" / "README.md"]
        for text in _INLINE.findall(page.read_text())
    ]
    unique = {command.text: command for command in [*blocks, *inline]}
    return [c for c in unique.values() if c.text not in ("…", "--help")]
