"""Reads names and signatures out of vLLM's sources, without running them."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rich.console import Console

from bench.command import write_json
from bench.surface.needs import HOOKS, USES
from ttlcache.cli.command import argument, option

#: A path inside the distribution -> its text, None where there is no such file.
Read = Callable[[str], str | None]
#: Parameter names for a function, "" for anything else, None where it is absent.
Found = list[str] | str | None


@dataclass(frozen=True, slots=True)
class SurfaceOptions:
    """Sources of vLLM, and where what they have is written."""

    wheels: list[Path] = argument("vLLM's wheels.")
    out: Path | None = option(None, "Folder for vllm-VERSION.json.")


def read_surface(options: SurfaceOptions, console: Console) -> None:
    """Which of the names that ttlcache relies on a vLLM has, read from its source."""
    for wheel in options.wheels:
        named = re.match(r"vllm\w*-([^-]+)-", wheel.name)
        if named is None:
            raise ValueError(f"{wheel}: no wheel of vLLM")
        found, version = surface(reader(wheel)), named[1]
        lacks = ", ".join(missing(found))
        console.print(f"vLLM {version}: {lacks or 'nothing'} missing")
        if options.out is not None:
            value = {"version": version, "names": found}
            write_json(options.out / f"vllm-{version}.json", value)


def reader(source: Path) -> Read:
    """Of a wheel, or of the folder that holds the package `vllm`.

    Raises:
        FileNotFoundError: no vLLM there.
    """
    if source.is_dir():
        if not (source / "vllm" / "__init__.py").is_file():
            raise FileNotFoundError(f"{source} has no package vllm")
        return lambda path: _text(source / path)
    wheel = zipfile.ZipFile(source)
    names = set(wheel.namelist())
    return lambda path: wheel.read(path).decode() if path in names else None


def surface(read: Read) -> dict[str, Found]:
    """Every name of `HOOKS` and `USES` as "Class.name" -> what the source says."""
    sources = _Sources(read)
    found: dict[str, Found] = {}
    for where, members in HOOKS.items():
        found |= _members(sources, where, members)
    for where, members in USES.items():
        found |= _members(sources, where, [m.partition("(")[0] for m in members])
    queue = "vllm/v1/core/sched/request_queue.py"
    found["RequestQueue:abstract"] = sources.abstract_methods(queue, "RequestQueue")
    return found


def missing(found: dict[str, Found]) -> list[str]:
    """What we use and the source lacks: "Class.name" or "Class.name(parameter)"."""
    absent = [
        f"{cls}.{name}"
        for where, members in HOOKS.items()
        for cls in [where.partition("::")[2]]
        for name in members
        if found.get(f"{cls}.{name}") is None
    ]
    for where, members in USES.items():
        cls = where.partition("::")[2]
        for member in members:
            name, _, parameters = member.partition("(")
            there = found.get(f"{cls}.{name}")
            if there is None:
                absent.append(f"{cls}.{name}")
                continue
            wanted = [p.strip() for p in parameters.rstrip(")").split(",") if p.strip()]
            absent += [f"{cls}.{name}({p})" for p in wanted if p not in there]
    return sorted(absent)


def _members(
    sources: _Sources, where: str, members: list[str] | tuple[str, ...]
) -> dict[str, Found]:
    path, _, cls = where.partition("::")
    return {f"{cls}.{name}": sources.find(path, cls, name) for name in members}


class _Sources:
    def __init__(self, read: Read) -> None:
        self._read = read
        self._parse = lru_cache(maxsize=None)(self._parse_file)

    def find(self, path: str, cls: str, name: str) -> Found:
        """A member of a class, its own or inherited."""
        node = self._class(path, cls)
        if node is None:
            return None
        found = _own_member(node, name)
        if found is not None:
            return found
        for base in node.bases:
            at = self._resolve(path, base)
            inherited = None if at is None else self.find(*at, name)
            if inherited is not None:
                return inherited
        return None

    def abstract_methods(self, path: str, cls: str) -> Found:
        node = self._class(path, cls)
        if node is None:
            return None
        return [
            each.name
            for each in node.body
            if isinstance(each, ast.FunctionDef)
            and any(
                isinstance(mark, ast.Name) and mark.id == "abstractmethod"
                for mark in each.decorator_list
            )
        ]

    def _class(self, path: str, cls: str) -> ast.ClassDef | None:
        tree = self._parse(path)
        for node in tree.body if tree is not None else ():
            if isinstance(node, ast.ClassDef) and node.name == cls:
                return node
        return None

    def _resolve(self, path: str, base: ast.expr) -> tuple[str, str] | None:
        """File and name of a base class: in this file, or imported by name."""
        if not isinstance(base, ast.Name):
            return None
        if self._class(path, base.id) is not None:
            return path, base.id
        tree = self._parse(path)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == base.id:
                        return node.module.replace(".", "/") + ".py", alias.name
        return None

    def _parse_file(self, path: str) -> ast.Module | None:
        text = self._read(path)
        return None if text is None else ast.parse(text)


def _own_member(cls: ast.ClassDef, name: str) -> Found:
    for node in cls.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name:
                is_property = any(
                    isinstance(mark, ast.Name) and mark.id == "property"
                    for mark in node.decorator_list
                )
                return "" if is_property else _parameters(node.args)
        elif _assigns(node, lambda t: isinstance(t, ast.Name) and t.id == name):
            return ""
    for inside in ast.walk(cls):
        if _assigns(inside, lambda t: _is_self(t, name)):
            return ""
    return None


def _parameters(arguments: ast.arguments) -> list[str]:
    """Names without self and cls; "*" and "**" before the rest."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = [each.arg for each in every if each.arg not in ("self", "cls")]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    return names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def _assigns(node: ast.AST, is_it: Callable[[ast.expr], bool]) -> bool:
    if isinstance(node, ast.Assign):
        targets = [
            each
            for target in node.targets
            for each in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
        return any(is_it(target) for target in targets)
    return isinstance(node, ast.AnnAssign) and is_it(node.target)


def _is_self(target: ast.expr, name: str) -> bool:
    return (
        isinstance(target, ast.Attribute)
        and target.attr == name
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    )


def _text(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None
