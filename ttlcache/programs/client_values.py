"""Values that clients send: the one place where they are checked.

Headers, URLs, bodies, hints and the control API all read through here. What comes out
is a scalar of bounded size that every process boundary can carry; what does not fit
raises `UnfitValueError` with the reason under which it is counted.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

#: Longest accepted program id; anything longer is abuse or a mistake.
MAX_ID_CHARS = 256
MAX_TOOL_CHARS = 256
MAX_TOOLS = 32
MAX_PRIORITY_CLASS = 1_000
#: What msgpack, and with it vLLM's way to its engine, can carry.
MIN_INT, MAX_INT = -(1 << 63), (1 << 64) - 1
#: Longer times are as good as for ever, and overflow nothing.
MAX_SECONDS = 1e9
#: vLLM's own bound.
MAX_SALT_CHARS = 1024
#: Nesting of what a client leaves for connectors. `pickle`, by which an engine sends
#: requests to its workers, gives up near 480, and the engine with it.
MAX_DEPTH = 32
#: Characters, and values of any kind, of all that together: the block ids of a million
#: tokens in four cache groups. The scheduler's thread walks over them, at 2 MB/s.
MAX_NESTED_SIZE = 1 << 18
#: Entries of one object that do not fit; with more of them it is read no further.
MAX_UNFIT = 100

_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(ms|s|m|h)?", re.ASCII)
_SCALARS = (str, int, float, type(None))
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_FLAGS = {"1": True, "true": True, "yes": True, "on": True}
_FLAGS |= {"0": False, "false": False, "no": False, "off": False}


class UnfitValueError(Exception):
    """A client's value that is not used; its text is a label of `hints_rejected`."""


def client_id(value: object) -> str:
    """An id: text, or an integer of 64 bits as text.

    Raises:
        UnfitValueError: anything else, empty, or longer than `MAX_ID_CHARS`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if not MIN_INT <= value <= MAX_INT:
            raise UnfitValueError("id_range")
        value = str(value)
    text = _text(value, "id", MAX_ID_CHARS)
    if not text:
        raise UnfitValueError("id_empty")
    return text


def header_id(value: object) -> str:
    """An id that every header can carry: bounded ASCII without blanks around it.

    One that is longer, or that no header can carry, becomes its digest.

    Raises:
        UnfitValueError: no id, or only blanks.
    """
    text = client_id(value) if not isinstance(value, str) else value.strip()
    if not text:
        raise UnfitValueError("id_empty")
    if len(text) <= MAX_ID_CHARS and text.isascii() and text.isprintable():
        return text
    if not is_encodable(text):
        raise UnfitValueError("id_encoding")
    return "sha256-" + hashlib.sha256(text.encode()).hexdigest()


def client_flag(value: object) -> bool:
    """A boolean; 0 and 1 too, as `vllm_xargs` carries no booleans."""
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise UnfitValueError("bool_type")


def header_flag(value: object) -> bool:
    """A boolean as headers spell it."""
    flag = _FLAGS.get(value.strip().lower()) if isinstance(value, str) else None
    if flag is None:
        raise UnfitValueError("bool_type")
    return flag


def client_tools(value: object) -> tuple[str, ...]:
    """Names of tools, from one or a list of them."""
    names = value if isinstance(value, list) else [value]
    if len(names) > MAX_TOOLS:
        raise UnfitValueError("too_many_tools")
    texts = [_text(name, "tool", MAX_TOOL_CHARS) for name in names]
    return tuple(text for text in texts if text)


def client_seconds(value: object) -> float:
    """Seconds from a number or a string such as "5m", "1h", "250ms", "300".

    At most `MAX_SECONDS`; negative and infinite ones are refused.
    """
    if isinstance(value, str) and len(value) <= 32:
        if match := _DURATION.fullmatch(value.strip()):
            return min(float(match[1]) * _UNIT_S[match[2] or "s"], MAX_SECONDS)
    elif _is_number(value) and 0 <= value <= sys.float_info.max:
        return min(float(value), MAX_SECONDS)
    raise UnfitValueError("duration")


def client_priority(value: object) -> int:
    """A priority class."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnfitValueError("priority_type")
    if abs(value) > MAX_PRIORITY_CLASS:
        raise UnfitValueError("priority_range")
    return value


def client_number(value: object) -> float:
    """A number in [0, `MAX_SECONDS`]."""
    if not _is_number(value) or not 0 <= value <= MAX_SECONDS:
        raise UnfitValueError("number")
    return value


def client_salt(value: object) -> str:
    """A `cache_salt`: the tenant."""
    return _text(value, "salt", MAX_SALT_CHARS)


def is_encodable(text: str) -> bool:
    """Whether it is UTF-8; a lone surrogate is not."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def fitting(
    values: Mapping[Any, Any], max_depth: int = MAX_DEPTH
) -> tuple[dict[Any, Any], list[str]]:
    """The entries of a client's object that may go on, and why the others may not.

    All that may go on is together at most `MAX_NESTED_SIZE`. Integers are left to vLLM,
    see `holds_wide_int`.
    """
    kept, reasons, left = {}, [], MAX_NESTED_SIZE
    for key, value in values.items():
        try:
            left_then = _measure((key, value), left, max_depth)
        except UnfitValueError as unfit:
            reasons.append(str(unfit))
            if len(reasons) >= MAX_UNFIT:
                break
            continue
        kept[key], left = value, left_then
    return kept, reasons


def holds_wide_int(value: object) -> bool:
    """Whether there is an integer in it for which vLLM refuses the request.

    Looked for among its first `MAX_NESTED_SIZE` parts.
    """
    pending, left = [value], MAX_NESTED_SIZE
    while pending and left > 0:
        part = pending.pop()
        if isinstance(part, int) and not MIN_INT <= part <= MAX_INT:
            return True
        left -= 1
        pending += _parts(part)[:left]
    return False


def _measure(entry: object, left: int, max_depth: int) -> int:
    """`left` less the size of `entry`. What is too deep must not recurse."""
    level, depth = [entry], 0
    while level:
        if depth > max_depth:
            raise UnfitValueError("nested_too_deep")
        deeper: list[object] = []
        for part in level:
            left -= 1
            if isinstance(part, str):
                left -= len(part)
                if not is_encodable(part):
                    raise UnfitValueError("nested_encoding")
            else:
                deeper += _parts(part)
            if left < len(deeper):
                raise UnfitValueError("nested_too_large")
        level, depth = deeper, depth + 1
    return left


def _parts(value: object) -> Sequence[object]:
    """What an object or a list consists of, keys too."""
    if isinstance(value, _SCALARS):  # as most; `Mapping` is slow to say no
        return ()
    if isinstance(value, Mapping):
        return (*value.keys(), *value.values())
    return value if isinstance(value, list | tuple) else ()


def _text(value: object, what: str, max_chars: int) -> str:
    if not isinstance(value, str):
        raise UnfitValueError(f"{what}_type")
    if len(value) > max_chars:
        raise UnfitValueError(f"{what}_too_long")
    if not is_encodable(value):
        raise UnfitValueError(f"{what}_encoding")
    return value


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
