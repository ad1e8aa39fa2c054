"""Every exception that ttlcache raises on purpose.

TTLCacheError
├── ConfigError             a configuration key, type or value is wrong
├── TransferError           a copy plan or a memory layout that cannot be served
└── UnsupportedEngineError  the installed engine was never tested with this release
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


class TTLCacheError(Exception):
    """Base of all errors of this package."""


class ConfigError(TTLCacheError, ValueError):
    """A configuration value is wrong; the text names key, value and expectation."""


class UnsupportedEngineError(TTLCacheError, RuntimeError):
    """The installed serving engine lies outside the tested range."""


class TransferError(TTLCacheError, ValueError):
    """A layout or plan that our transfer path cannot serve; the text says why.

    Raised where plans are made. An engine that runs a plan never raises: a failed
    copy is an `Outcome`.
    """


def explain(model: type[BaseModel], error: ValidationError) -> str:
    """Each wrong key of `model` with its value and what was expected."""
    return "; ".join(_explain_one(model, dict(item)) for item in error.errors())


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Which of `names` was probably meant; None where none is near."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.65)
    return near[0] if near else None


def _explain_one(model: type[BaseModel], item: dict[str, Any]) -> str:
    key, names = str(item["loc"][0]) if item["loc"] else "?", list(model.model_fields)
    value = item.get("input")
    if item["type"] == "extra_forbidden":
        near = nearest(key, names)
        valid = f"valid keys: {', '.join(names) or 'none'}"
        help_text = valid if near is None else f"did you mean {near!r}?"
        return f"unknown key {key!r} (value {value!r}); {help_text}"
    field = model.model_fields.get(key)
    meaning = f" ({field.description})" if field is not None else ""
    if item["type"] == "missing":
        return f"key {key!r} is missing{meaning}"
    expected = str(item["msg"])
    for prefix in ("Value error, ", "Input should be "):
        expected = expected.removeprefix(prefix)
    return f"key {key!r} has value {value!r}, expected: {expected}{meaning}"
