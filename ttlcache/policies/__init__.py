"""Retention policies by name. Adding one: a file here and a line in `_TARGETS`."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from ttlcache.class_path import load_class
from ttlcache.errors import ConfigError, explain, nearest
from ttlcache.policies.base import Policy, PolicyOptions, View

__all__ = ["Policy", "PolicyOptions", "View", "create", "names", "register"]

# Name -> "module:Class". Imported on first use: one broken module of an outside
# author must not take the others down.
_TARGETS: dict[str, str] = {
    "none": "ttlcache.policies.none:NoRetention",
    "fixed": "ttlcache.policies.fixed:FixedTTL",
    "ski-rental": "ttlcache.policies.ski_rental:SkiRental",
    "cachettl": "ttlcache.policies.cachettl:CacheTTL",
    "adaptive": "ttlcache.policies.adaptive:Adaptive",
    "observe": "ttlcache.policies.observe:Observe",
}


#: Those that come with ttlcache.
SHIPPED = tuple(_TARGETS)


def names() -> tuple[str, ...]:
    """Every registered policy name."""
    return tuple(_TARGETS)


def register(name: str, target: str) -> None:
    """Make "package.module:Class" selectable as `name`.

    Raises:
        ConfigError: the name is taken by another class, or `target` has no colon.
    """
    module, colon, class_name = target.partition(":")
    if not (module and colon and class_name):
        raise ConfigError(f"policy target {target!r}: expected 'package.module:Class'")
    taken = _TARGETS.setdefault(name, target)
    if taken != target:
        raise ConfigError(f"policy name {name!r} is taken by {taken}")


def create(name: str, options: Mapping[str, object] | None = None) -> Policy:
    """A policy by its registered name.

    Raises:
        ConfigError: unknown name, unknown option or wrong option value; the text
            names the key, the value and what was expected.
    """
    policy_class = _load(name)
    try:
        found = policy_class.Options.model_validate(dict(options or {}))
    except ValidationError as error:
        problems = explain(policy_class.Options, error)
        raise ConfigError(f"options of policy {name!r}: {problems}") from None
    return policy_class(found)


def _load(name: str) -> type[Policy]:
    target = _TARGETS.get(name)
    if target is None:
        near = nearest(name, names())
        meant = "" if near is None else f"did you mean {near!r}? "
        known = ", ".join(names())
        raise ConfigError(f"unknown policy: {name!r}; {meant}expected one of: {known}")
    return load_class(target, Policy, f"policy {name!r}")
