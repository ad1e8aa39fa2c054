"""`ttlcache report DIR`: a recording, or a live server, on one page."""

from __future__ import annotations

import html
import tempfile
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from ttlcache.analysis.recording import Recording
from ttlcache.analysis.summary import summarize
from ttlcache.cli.common import fail, numbers, plain, printable, read
from ttlcache.cli.live import reason
from ttlcache.cli.report_tables import Table, of_metrics, of_recording

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>ttlcache report</title><style>
body {{ font: 15px/1.4 sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse; margin: 0 0 .5em }}
td, th {{ padding: .15em 1em .15em 0; text-align: right; vertical-align: top }}
td:first-child {{ text-align: left; overflow-wrap: anywhere }}
img {{ max-width: 100% }}
</style></head><body><h1>ttlcache report</h1><p>{source}</p>
{body}
</body></html>
"""


def report(
    place: Annotated[
        Path | None,
        typer.Argument(help="Folder of a recording, or one of its files."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running vLLM server, in place of a recording.")
    ] = None,
    html_path: Annotated[
        Path | None,
        typer.Option("--html", help="Write the page, with figures, to this file."),
    ] = None,
) -> None:
    """What pins saved, who waited for what, slow tools, programs that break prefixes.

    Each row says how many samples it is of, and whether it is measured or estimated.
    """
    if (place is None) == (url is None):
        fail("expected one of: the folder of a recording, --url of a server")
    recording = None if place is None else read(place)
    if recording is not None:
        tables = of_recording(recording, summarize(recording))
    else:
        tables = of_metrics(_metrics(str(url)))
    tables = [table for table in tables if table.rows]
    console = Console()
    for table in tables:
        _print(table, console)
    if html_path is not None:
        figures = [] if recording is None else _figures(recording)
        source = html.escape(printable(url or place))
        body = "\n".join([*map(_html_table, tables), *figures])
        try:
            html_path.write_text(_PAGE.format(source=source, body=body), "utf-8")
        except OSError as error:
            fail(f"{html_path}: {error.strerror or error}")
        console.print(str(html_path), soft_wrap=True, highlight=False)


def _metrics(url: str) -> str:
    try:
        answer = httpx.get(f"{url.rstrip('/')}/metrics", timeout=15.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"{url}: {reason(error)}")
    if answer.status_code != 200 or "\nttlcache_" not in answer.text:
        fail(f"{url} does not run ttlcache (status {answer.status_code}, no metrics)")
    return answer.text


def _print(table: Table, console: Console) -> None:
    columns = (*table.columns, "samples", "how")
    widest = 24 if len(columns) > 4 else 40
    grid = numbers(table.title, columns, widest_name=widest)
    for name, *cells in table.rows:
        grid.add_row(plain(name), *map(plain, cells))
    console.print(grid)
    for note in table.notes:
        console.print(f"  {plain(note)}", style="dim", highlight=False)
    console.print()


# --- the HTML page ---------------------------------------------------------------


def _html_table(table: Table) -> str:
    heads = _cells("th", ("", *table.columns, "samples", "how"))
    lines = [f"<h2>{html.escape(table.title)}</h2>\n<table>\n<tr>{heads}</tr>"]
    lines += [f"<tr>{_cells('td', row)}</tr>" for row in table.rows]
    notes = (f"<p>{html.escape(note)}</p>" for note in table.notes)
    return "\n".join([*lines, "</table>", *notes])


def _cells(tag: str, texts: Sequence[str]) -> str:
    cells = (f"<{tag}>{html.escape(printable(text))}</{tag}>" for text in texts)
    return "".join(cells)


def _figures(recording: Recording) -> list[str]:
    """Those of `ttlcache plot`, as data in the page itself."""
    try:
        from ttlcache.analysis import timeline
    except ImportError as error:
        fail(f"{error}; pip install 'ttlcache[plot]'")
    with tempfile.TemporaryDirectory() as folder:
        paths = timeline.draw_all(recording, Path(folder))
        data = {path.stem: b64encode(path.read_bytes()).decode() for path in paths}
    return [
        f'<img alt="{name}" src="data:image/png;base64,{png}">'
        for name, png in data.items()
    ]
