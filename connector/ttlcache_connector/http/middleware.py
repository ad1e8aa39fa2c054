"""ASGI middleware: agents' own headers and bodies become vLLM's session id.

The plugin adds it to the API server by itself when TTLConnector is used; for other
set-ups it can be named with vLLM's `--middleware`. Twice does no harm. Answers get the
header `X-TTLCache-Program` with the id that was found, quoted as in a URL; a program
found by its prompt has none here, as the engine alone knows it. Whatever goes wrong in
here costs the request its identity, never its answer.
"""

from __future__ import annotations

import collections
import functools
from urllib.parse import quote, unquote

from prometheus_client import Counter

from ttlcache.programs.hints import ROUTE_PREFIX
from ttlcache.programs.table import bounded
from ttlcache.telemetry.metrics import HTTP_COUNTERS
from ttlcache_connector.http import control
from ttlcache_connector.http.asgi import (
    GENERATING,
    App,
    Message,
    Receive,
    Scope,
    Send,
    read_body,
    replay,
    with_length,
)
from ttlcache_connector.http.billing_header import without_billing_header
from ttlcache_connector.http.clues import (
    from_body,
    from_headers,
    split_path,
    with_hints,
)
from ttlcache_connector.http.known_clients import PROGRAM_HEADER, RULES, SESSION_HEADER
from ttlcache_connector.log import logger

log = logger(__name__)

_SEEN = "ttlcache"


class ProgramIdMiddleware:
    """Finds the program of each request; answers `/ttlcache/…` itself."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._requests, self._dropped, self._errors = _counters()
        self._logged = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _SEEN in scope:
            await self.app(scope, receive, send)
            return
        sent = _path(scope)
        session, path = _resolve(scope, sent)
        if path.startswith("/ttlcache/"):
            await control.answer(path, scope, receive, send)
            return
        # A copy: whoever wraps us keeps seeing the request as it came.
        scope = {**scope, _SEEN: True}
        if path != sent:
            scope["path"] = scope["path"].removesuffix(sent) + path
            scope["raw_path"] = quote(scope["path"]).encode()
        generates = scope["method"] == "POST" and path in GENERATING
        # vLLM asks for its key after us: nobody's bodies are held without one.
        if generates and control.authorized(scope):
            receive, program = await self._identify(scope, receive, session)
            if program is not None:
                send = _with_header(send, program)
        await self.app(scope, receive, send)

    async def _identify(
        self, scope: Scope, receive: Receive, url_session: str | None
    ) -> tuple[Receive, bytes | None]:
        """The body for vLLM, and the program's id for the answer's header."""
        messages, body = await read_body(receive)
        program = None
        try:
            headers = scope["headers"]
            stripped = None if body is None else without_billing_header(body)
            if stripped is not None:
                body = stripped
            clues = from_headers(headers, url_session)
            if body is not None:
                clues = from_body(body, clues)
            if clues.session is not None:
                # In one spelling, and once: the engine takes the first it finds.
                others = [h for h in headers if h[0].lower() != SESSION_HEADER]
                session = (SESSION_HEADER, clues.session.encode())
                scope["headers"] = [*others, session]
            changed = None if body is None else with_hints(body, clues) or stripped
            if changed is not None:
                messages = [{"type": "http.request", "body": changed}]
                scope["headers"] = with_length(scope["headers"], len(changed))
            self._requests.labels(clues.rule).inc()
            for reason, count in collections.Counter(clues.dropped).items():
                self._dropped.labels(reason).inc(count)
            told = clues.named or clues.session
            if told and not told.startswith(ROUTE_PREFIX):
                program = quote(bounded(told), safe="").encode()
        except Exception:  # noqa: BLE001 - the serving path fails open
            self._fault()
        return replay(messages, receive), program

    def _fault(self) -> None:
        self._errors.inc()
        if not self._logged:
            self._logged = True
            log.warning(
                "ttlcache: the middleware failed; requests go on without identity "
                "(logged once)",
                exc_info=True,
            )


def _path(scope: Scope) -> str:
    """The path below the server's root."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _with_header(send: Send, program: bytes) -> Send:
    """Tells the client its program's id, unless the request failed."""

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] < 400:
            headers = [*message.get("headers", ()), (PROGRAM_HEADER, program)]
            message = {**message, "headers": headers}
        await send(message)

    return named


def _resolve(scope: Scope, path: str) -> tuple[str | None, str]:
    """The session in the URL, and the path that vLLM knows."""
    if not path.startswith("/sessions/"):
        return None, path
    # Raw: a slash that is escaped belongs to the id.
    raw = (scope.get("raw_path") or quote(scope["path"]).encode()).decode("latin-1")
    start = raw.find("/sessions/")
    if start < 0:
        return None, path
    session, rest = split_path(raw[start:])
    return session, unquote(rest)


@functools.cache
def _counters() -> tuple[Counter, Counter, Counter]:
    """Our counters in this process's registry, which takes each name once."""
    requests, dropped, errors = (
        Counter(name, text, labels) for name, (text, labels) in HTTP_COUNTERS.items()
    )
    for rule in RULES:
        requests.labels(rule)
    return requests, dropped, errors
