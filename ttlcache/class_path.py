"""Classes of outside authors, named in the configuration as "package.module:Class"."""

from __future__ import annotations

import importlib
from typing import Any

from ttlcache.errors import ConfigError


def load_class(path: str, base: type[Any], what: str) -> type[Any]:
    """The subclass of `base` that "package.module:Class" names.

    Args:
        what: the setting that names it, for the text of the error.

    Raises:
        ConfigError: no such module or class, or no subclass of `base`.
    """
    module, _, class_name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what}: cannot load {path}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{what}: {path} is not a subclass of {base.__name__}")
    return found
