"""Hook of mkdocs: pages outside docs/ become pages of the site, with working links."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
#: Path in the repository -> path in the site, of what is not under docs/.
OUTSIDE = {"README.md": "index.md", "bench/README.md": "benches.md"}
OUTSIDE |= {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
OUTSIDE |= {"CITATION.cff": "CITATION.cff"}
_LINK = re.compile(r"(\]\()(?!https?:|#)([^)#]+)")


def on_files(files: Files, config: Any) -> Files:
    for source, target in OUTSIDE.items():
        content = (ROOT / source).read_text()
        files.append(File.generated(config, target, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Each link leads to where its target is in the site."""
    here = page.file.src_uri
    source = next((s for s, t in OUTSIDE.items() if t == here), f"docs/{here}")

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        in_site = OUTSIDE.get(target, target.removeprefix("docs/"))
        return link[1] + posixpath.relpath(in_site, posixpath.dirname(here) or ".")

    return _LINK.sub(moved, markdown)
