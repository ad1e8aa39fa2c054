"""`/ttlcache/…`: what clients and `ttlcache top` tell and ask a live server.

    POST /ttlcache/programs/{id}/end        the program is over
    POST /ttlcache/programs/{id}/progress   {"eta_s": 12.5} or {"done": 3, "total": 9}
    GET  /ttlcache/programs                 programs and pins, as `ttlcache top` shows

The body may name a `cache_salt`, the tenant of the program. With `--api-key` the
same key is asked for here.
"""

from __future__ import annotations

import hmac
import json
import os
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from ttlcache.programs.client_values import (
    MAX_SALT_CHARS,
    MAX_SECONDS,
    UnfitValueError,
    client_number,
    client_salt,
)
from ttlcache_connector.engine import vllm_internals
from ttlcache_connector.http.asgi import read_body, send_json
from ttlcache_connector.http.naming import label
from ttlcache_connector.log import logger

log = logger(__name__)

MAX_BODY_BYTES = 64 * 1024
_PROGRAM = re.compile(r"/ttlcache/programs/(.+)/(end|progress)", re.DOTALL)
_FIELDS = {
    "end": {"cache_salt"},
    "progress": {"cache_salt", "eta_s", "done", "total", "elapsed_s"},
}


class _BadRequestError(Exception):
    """The client's mistake; its text is the answer."""


async def answer(path: str, scope: Any, receive: Any, send: Any) -> None:
    """Serve one request under `/ttlcache/`; never raises for what a client sent."""
    try:
        status, content = await _respond(path, scope, receive)
    except _BadRequestError as error:
        status, content = 400, {"error": str(error)}
    except Exception:
        log.warning("ttlcache: %.200r failed", path, exc_info=True)
        status, content = 503, {"error": "the engine did not answer"}
    await send_json(send, status, content)


async def _respond(path: str, scope: Any, receive: Any) -> tuple[int, Any]:
    state = scope["app"].state
    if not authorized(scope):
        return 401, {"error": "Unauthorized"}
    if path == "/ttlcache/programs" and scope["method"] == "GET":
        answers = await vllm_internals.ask_engines(
            state.engine_client, {"do": "programs"}
        )
        return 200, {"engines": answers}
    match = _PROGRAM.fullmatch(path)
    if match is None:
        return 404, {"error": f"no such path: {path}"}
    if scope["method"] != "POST":
        return 405, {"error": "POST it"}
    # The path is decoded already; an id may itself contain `%XX`.
    program_id = label(match[1])
    if program_id is None:
        raise _BadRequestError("the program id is empty")
    fields = await _fields(receive, match[2])
    order = {"do": match[2], "program_id": program_id, **fields}
    # A hint in a body is kept as it is, a header's or a URL's id as `label` has it.
    once_more = unquote(match[1])
    spellings = dict.fromkeys((match[1], label(once_more), once_more))
    others = [text for text in spellings if text not in (None, program_id)]
    if others:
        order["as_sent"] = others
    answers = await vllm_internals.ask_engines(state.engine_client, order)
    known = [a for a in answers if a.get("known")]
    if not known:
        return 404, {"program_id": program_id, "known": False}
    return 200, {"program_id": program_id, **_of_all(known)}


def _of_all(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One answer for all engines that know a program: several where it moved."""
    if len(answers) == 1:
        return answers[0]
    merged = {key: answers[0][key] for key in answers[0] if key != "gauges"}
    if "pins" in merged:
        merged["pins"] = [pin for answer in answers for pin in answer["pins"]]
    return merged


async def _fields(receive: Any, action: str) -> dict[str, Any]:
    _, body = await read_body(receive, MAX_BODY_BYTES)
    if body is None:
        text = f"the body was cut off, or is longer than {MAX_BODY_BYTES} bytes"
        raise _BadRequestError(text)
    if not body.strip():
        return {}
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise _BadRequestError("the body is no JSON") from None
    if not isinstance(fields, dict):
        raise _BadRequestError("the body is no JSON object")
    unknown = sorted(set(fields) - _FIELDS[action])
    if unknown:
        raise _BadRequestError(
            f"unknown field {unknown[0]!r:.200}, expected: {sorted(_FIELDS[action])}"
        )
    return {name: _checked(name, value) for name, value in fields.items()}


def _checked(name: str, value: object) -> str | float:
    is_salt = name == "cache_salt"
    try:
        return client_salt(value) if is_salt else client_number(value)
    except UnfitValueError:
        expected = f"a number in [0, {MAX_SECONDS:g}]"
        if is_salt:
            expected = f"text of at most {MAX_SALT_CHARS} characters"
        is_scalar = value is None or isinstance(value, bool | int | float | str)
        told = f"{value!r:.80}" if is_scalar else type(value).__name__
        raise _BadRequestError(
            f"{name} has value {told}, expected: {expected}"
        ) from None


def authorized(scope: Any) -> bool:
    """Whether a request brings the server's key, as vLLM asks for it."""
    args = getattr(getattr(scope.get("app"), "state", None), "args", None)
    keys = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    keys = [key for key in keys if key]
    if not keys:
        return True
    headers = ((name.lower(), value) for name, value in scope["headers"])
    given = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, key_given = given.partition(b" ")
    # Every key is compared, in constant time each.
    matches = [hmac.compare_digest(key_given, key.encode()) for key in keys]
    return scheme.lower() == b"bearer" and any(matches)
