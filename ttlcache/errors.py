"""Every exception that ttlcache raises on purpose.

TTLCacheError
├── ConfigError             a configuration key, type or value is wrong
├── TransferError           a copy plan or a memory layout that cannot be served
└── UnsupportedEngineError  the installed engine was never tested with this release
"""

from __future__ import annotations

import difflib
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


def _explain_one(model: type[BaseModel], item: dict[str, Any]) -> str:
    key, names = str(item["loc"][0]) if item["loc"] else "?", list(model.model_fields)
    value = item.get("input")
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.65)
        help_text = (
            f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(names)}"
        )
        return f"unknown key {key!r} (value {value!r}); {help_text}"
    field = model.model_fields.get(key)
    meaning = f" ({field.description})" if field is not None else ""
    if item["type"] == "missing":
        return f"key {key!r} is missing{meaning}"
    expected = str(item["msg"]).removeprefix("Value error, ")
    return f"key {key!r} has value {value!r}, expected: {expected}{meaning}"
