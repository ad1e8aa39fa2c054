"""Command lines from frozen dataclasses: an option is written once, as a field.

A field made by `option` or `argument` is one; its name, type and default are the
field's. A subclass that gives it another default gives nothing else. A field that is
such a dataclass itself brings its own options along. On the command line a tuple is a
list with commas, a mapping a JSON object.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from rich.console import Console

from ttlcache.cli.common import fail

T = TypeVar("T")

#: In place of a default: the option must be given.
REQUIRED = object()
_OPTION = "option"


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


def argument(help_text: str, default: Any = REQUIRED) -> Any:
    """A field that is given by its place."""
    metadata = {_OPTION: typer.Argument(help=help_text)}
    return field(default=MISSING if default is REQUIRED else default, metadata=metadata)


def command(run: Callable[[Any, Console], int | None]) -> Callable[..., None]:
    """The typer command of `run(options, console)`, which returns the exit status.

    What the options refuse ends as a usage error, what `run` raises on purpose as one
    line and exit status 1.
    """
    options = get_type_hints(run)["options"]
    asked = list(_parameters(options))

    def main(**given: Any) -> None:
        try:
            chosen = _build(options, given)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        try:
            status = run(chosen, Console())
        except typer.Exit:
            raise  # a RuntimeError, too
        except (ValueError, RuntimeError, OSError) as error:
            fail(error)
        raise typer.Exit(status or 0)

    main.__name__, main.__doc__ = run.__name__, run.__doc__
    main.__annotations__ = {p.name: p.annotation for p in asked}
    main.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
    return main


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
