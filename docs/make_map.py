"""Draws docs/img/map.svg: packages on floors, their imports, a turn's way through them.

    python docs/make_map.py

A box is a file or folder directly under `ttlcache/` or `connector/ttlcache_connector/`.
A box imports only boxes on lower floors. An arrow that follows from others is left
out. Standard library only; the same sources give the same bytes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
#: Where the picture goes.
TARGET = ROOT / "docs" / "img" / "map.svg"
#: Package -> its folder, upper floors first.
PACKAGES = {
    "ttlcache_connector": ROOT / "connector" / "ttlcache_connector",
    "ttlcache": ROOT / "ttlcache",
}
_CONNECTOR, _CORE = PACKAGES


class Step(NamedTuple):
    """One station of a turn, and the boxes that serve it, in order."""

    name: str
    boxes: tuple[str, ...]
    what: str


def _step(name: str, boxes: str, what: str) -> Step:
    """`boxes`: names as drawn; `.name` stands for a box of the core."""
    full = (
        f"{_CORE}{box}" if box.startswith(".") else f"{_CONNECTOR}.{box}"
        for box in boxes.split()
    )
    return Step(name, tuple(full), what)


STEPS = (
    _step(
        "arrive",
        "http connector role .controller .programs",
        "find the program and the turn that it continues",
    ),
    _step(
        "may start",
        "scheduler queue role .controller .scheduling",
        "place in the queue, admission",
    ),
    _step(
        "allocate",
        "role .controller .retention blocks",
        "no free block: pins give way",
    ),
    _step(
        "finish",
        "connector role engine .toolcalls .controller",
        "which tool runs next",
    ),
    _step(
        "retain",
        ".controller .retention .policies blocks",
        "time-to-live, pin, references on blocks",
    ),
    _step(
        "expire / claim",
        "role .controller .retention blocks",
        "deadline, or the next turn",
    ),
    _step("demote", "blocks tiers copy", "copy blocks to the lower tier"),
    _step("reload", "role tiers copy", "look up and load"),
)

Graph = dict[str, set[str]]


def boxes_and_imports() -> Graph:
    """Box -> the boxes that it imports when it runs."""
    graph: Graph = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            box = _box(package, path.relative_to(folder).with_suffix("").parts)
            if box is not None:
                graph.setdefault(box, set()).update(_imports(package, folder, path))
    for box, targets in graph.items():
        targets &= graph.keys() - {box}
    return graph


def _box(package: str, parts: tuple[str, ...]) -> str | None:
    """None for the package's own `__init__`, which only names what it exports."""
    return None if parts[0] == "__init__" else f"{package}.{parts[0]}"


def _imports(package: str, folder: Path, path: Path) -> Iterator[str]:
    parents = [package, *path.relative_to(folder).parent.parts]
    for node in _running(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            kept = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*kept, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] in PACKAGES:
                yield ".".join(name.split(".")[:2])


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield other
                yield from _running(other)
        else:
            yield node
            yield from _running(node)


def floors(graph: Graph, package: str) -> list[list[str]]:
    """The package's boxes, the highest floor first.

    Raises:
        ValueError: boxes import each other.
    """
    known: dict[str, int] = {}

    def floor(box: str, above: tuple[str, ...]) -> int:
        if box in above:
            raise ValueError(f"circle of imports: {' -> '.join([*above, box])}")
        if box not in known:
            below = [b for b in graph[box] if b.startswith(f"{package}.")]
            known[box] = 1 + max((floor(b, (*above, box)) for b in below), default=0)
        return known[box]

    for box in graph:
        if box.startswith(f"{package}."):
            floor(box, ())
    highest = max(known.values())
    return [
        sorted(box for box in known if known[box] == level)
        for level in range(highest, 0, -1)
    ]


def essential(graph: Graph) -> list[tuple[str, str]]:
    """Imports that do not follow from a chain of others."""
    reach: Graph = {}

    def reached(box: str) -> set[str]:
        if box not in reach:
            reach[box] = graph[box].union(*map(reached, graph[box]))
        return reach[box]

    return sorted(
        (box, target)
        for box in graph
        for target in graph[box]
        if not any(target in reached(other) for other in graph[box] - {target})
    )


# --- the picture ---

_ROW, _HEIGHT, _GAP, _LEFT, _WIDTH = 56, 26, 34, 24, 900
_LEGEND = 330
_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728"),
    *("#9467bd", "#8c564b", "#e377c2", "#17a2b8"),
)


class Box(NamedTuple):
    """Where a box is drawn."""

    x: float
    y: float
    width: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


def _ordered(rows: list[list[str]], graph: Graph) -> list[list[str]]:
    """Each row sorted by where what imports its boxes stands: fewer crossings."""
    place: dict[str, float] = {}
    ordered = []
    for row in rows:
        wanted = {}
        for position, box in enumerate(row):
            above = [place[b] for b in place if box in graph[b]]
            middle = (position + 0.5) / len(row)
            wanted[box] = sum(above) / len(above) if above else middle
        row = sorted(row, key=lambda box: (wanted[box], box))
        place |= {box: (i + 0.5) / len(row) for i, box in enumerate(row)}
        ordered.append(row)
    return ordered


def _placed(graph: Graph) -> tuple[dict[str, Box], dict[str, float]]:
    """Boxes by name, and the top of each package's part."""
    boxes: dict[str, Box] = {}
    tops: dict[str, float] = {}
    rows: list[list[str]] = []
    starts: dict[int, str] = {}
    for package in PACKAGES:
        starts[len(rows)] = package
        rows += floors(graph, package)
    y = 16.0
    for number, row in enumerate(_ordered(rows, graph)):
        if number in starts:
            tops[starts[number]] = y
            y += 34
        widths = [16 + 7.2 * len(box.split(".")[1]) for box in row]
        free = _WIDTH - sum(widths)
        space = free / len(row)
        x = _LEFT + space / 2
        for box, width in zip(row, widths, strict=True):
            boxes[box] = Box(x, y, width)
            x += width + space
        y += _ROW
    tops[""] = y
    return boxes, tops


def _badges(box: str) -> Iterable[int]:
    return (i for i, step in enumerate(STEPS) if box in step.boxes)


def draw(graph: Graph) -> str:
    """The whole picture as SVG.

    Raises:
        KeyError: a step names a box that is not there.
    """
    boxes, tops = _placed(graph)
    for step in STEPS:
        for name in step.boxes:
            if name not in boxes:
                raise KeyError(f"step {step.name!r}: no package {name}")
    width, height = _LEFT + _WIDTH + _LEGEND, tops[""] + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" '
        f'width="{width}" height="{height:g}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height:g}" fill="#ffffff"/>',
    ]
    ends = [*list(tops.values())[1:]]
    for package, end in zip(PACKAGES, ends, strict=True):
        top = tops[package]
        parts.append(
            f'<rect x="{_LEFT - 14}" y="{top:g}" width="{_WIDTH + 28}" '
            f'height="{end - top - 8:g}" rx="8" fill="#f6f8fa" stroke="#d0d7de"/>'
            f'<text x="{_LEFT}" y="{top + 20:g}" font-size="14" font-weight="bold" '
            f'fill="#57606a">{package}</text>'
        )
    parts += [_arrow(boxes[a], boxes[b]) for a, b in essential(graph)]
    parts += [_ways(boxes, number) for number in range(len(STEPS))]
    for name, box in boxes.items():
        parts.append(_drawn(name, box))
    parts += _legend()
    return "\n".join([*parts, "</svg>", ""])


def _arrow(start: Box, end: Box) -> str:
    x1, y1, x2, y2 = start.middle, start.y + _HEIGHT, end.middle, end.y
    bend = max(14.0, (y2 - y1) / 3)
    return (
        f'<path d="M{x1:.1f} {y1:g} C{x1:.1f} {y1 + bend:.1f} {x2:.1f} '
        f'{y2 - bend - 5:.1f} {x2:.1f} {y2 - 5:g}" fill="none" stroke="#b6bec8"/>'
        f'<path d="M{x2 - 3:.1f} {y2 - 6:g} L{x2 + 3:.1f} {y2 - 6:g} '
        f'L{x2:.1f} {y2:g} Z" fill="#b6bec8"/>'
    )


def _ways(boxes: dict[str, Box], number: int) -> str:
    """A coloured line through the boxes of a step."""
    shift = 3.0 * (number - (len(STEPS) - 1) / 2)
    stops = [boxes[name] for name in STEPS[number].boxes]
    points = " ".join(
        f"{box.middle + shift:.1f},{box.y + _HEIGHT / 2 + shift / 3:.1f}"
        for box in stops
    )
    return (
        f'<polyline points="{points}" fill="none" stroke="{_COLOURS[number]}" '
        'stroke-width="2.5" stroke-opacity="0.55" stroke-linejoin="round"/>'
    )


def _drawn(name: str, box: Box) -> str:
    numbers = list(_badges(name))
    stroke = "#24292f" if numbers else "#8c959f"
    text = name.split(".")[1]
    out = [
        f'<rect x="{box.x:.1f}" y="{box.y:g}" width="{box.width:.1f}" '
        f'height="{_HEIGHT}" rx="4" fill="#ffffff" stroke="{stroke}"/>'
        f'<text x="{box.middle:.1f}" y="{box.y + 17:g}" text-anchor="middle" '
        f'fill="#24292f">{text}</text>'
    ]
    x = box.middle - 7.5 * (len(numbers) - 1)
    for place, number in enumerate(numbers):
        out.append(_badge(number, x + 15 * place, box.y - 6))
    return "".join(out)


def _badge(number: int, x: float, y: float) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:g}" r="7" fill="{_COLOURS[number]}"/>'
        f'<text x="{x:.1f}" y="{y + 3.5:g}" text-anchor="middle" font-size="10" '
        f'fill="#ffffff">{number + 1}</text>'
    )


def _legend() -> list[str]:
    x, y = _LEFT + _WIDTH + 34, 40
    out = [
        f'<text x="{x}" y="{y}" font-size="14" font-weight="bold" fill="#57606a">'
        "the way of a turn</text>"
    ]
    for number, step in enumerate(STEPS):
        top = y + 34 + 58 * number
        chain = ", ".join(box.split(".")[1] for box in step.boxes)
        out.append(
            _badge(number, x + 8, top - 4)
            + f'<text x="{x + 22}" y="{top}" font-weight="bold">{step.name}</text>'
            f'<text x="{x + 22}" y="{top + 15}" font-size="11" fill="#57606a">'
            f"{step.what}</text>"
            f'<text x="{x + 22}" y="{top + 29}" font-size="10" fill="#57606a">'
            f"{chain}</text>"
        )
    top = y + 34 + 58 * len(STEPS)
    out.append(
        f'<text x="{x}" y="{top}" font-size="11" fill="#57606a">'
        "grey arrow: imports; those that follow</text>"
        f'<text x="{x}" y="{top + 14}" font-size="11" fill="#57606a">'
        "from other arrows are left out</text>"
    )
    return out


if __name__ == "__main__":
    TARGET.write_text(draw(boxes_and_imports()))
