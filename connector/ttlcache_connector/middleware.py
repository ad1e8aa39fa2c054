"""ASGI middleware: agents' own headers and bodies become vLLM's session id.

The plugin adds it to the API server by itself when TTLConnector is used; for other
set-ups it can be named with vLLM's `--middleware`. Twice does no harm. Responses are
not touched. Whatever goes wrong in here costs the request its identity, never its
answer.
"""

from __future__ import annotations

import functools

from prometheus_client import Counter

from ttlcache.metrics import HTTP_COUNTERS
from ttlcache_connector import http_control
from ttlcache_connector.compat import logger
from ttlcache_connector.http_asgi import (
    GENERATING,
    App,
    Receive,
    Scope,
    Send,
    read_body,
    replay,
    with_length,
)
from ttlcache_connector.http_attribution import without_attribution
from ttlcache_connector.http_identity import (
    RULES,
    SESSION_HEADER,
    Clues,
    from_body,
    from_headers,
    split_path,
    with_hints,
)
from ttlcache_connector.http_rank import heed_rank

log = logger(__name__)

_SEEN = "ttlcache"


class ProgramIdMiddleware:
    """Finds the program of each request; answers `/ttlcache/…` itself."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._requests, self._errors = _counters()
        self._logged = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _SEEN in scope:
            await self.app(scope, receive, send)
            return
        session, path = _resolve(scope)
        if path.startswith("/ttlcache/"):
            await http_control.answer(path, scope, receive, send)
            return
        # A copy: whoever wraps us keeps seeing the request as it came.
        scope = {**scope, _SEEN: True}
        if session is not None:
            root = scope.get("root_path", "")
            scope["path"] = root + path
            scope["raw_path"] = scope["path"].encode("utf-8", "surrogateescape")
        generates = scope["method"] == "POST" and path in GENERATING
        # vLLM asks for its key after us: nobody's bodies are held without one.
        if generates and http_control.authorized(scope):
            receive = await self._identify(scope, path, receive, session)
        await self.app(scope, receive, send)

    async def _identify(
        self, scope: Scope, path: str, receive: Receive, url_session: str | None
    ) -> Receive:
        messages, body = await read_body(receive)
        try:
            heed_rank(scope, path)
            headers = scope["headers"]
            stripped = None if body is None else without_attribution(body)
            if stripped is not None:
                body = stripped
            clues = Clues() if body is None else from_body(body)
            by_header = from_headers(headers)
            if by_header is None and url_session is not None:
                by_header = ("url", url_session)
            rule, session = by_header or (clues.rule, clues.session)
            if rule != "x-session-id" and session is not None:
                scope["headers"] = [*headers, (SESSION_HEADER, session.encode())]
            changed = None if body is None else with_hints(body, clues) or stripped
            if changed is not None:
                messages = [{"type": "http.request", "body": changed}]
                scope["headers"] = with_length(scope["headers"], len(changed))
            self._requests.labels(rule).inc()
        except Exception:  # noqa: BLE001 - the serving path fails open
            self._fault()
        return replay(messages, receive)

    def _fault(self) -> None:
        self._errors.inc()
        if not self._logged:
            self._logged = True
            log.warning(
                "ttlcache: the middleware failed; requests go on without identity "
                "(logged once)",
                exc_info=True,
            )


def _resolve(scope: Scope) -> tuple[str | None, str]:
    """The session in the URL, and the path that vLLM knows."""
    path = scope["path"]
    root = scope.get("root_path", "")
    if root and path.startswith(root + "/"):
        path = path[len(root) :]
    return split_path(path)


@functools.cache
def _counters() -> tuple[Counter, Counter]:
    """Our counters in this process's registry, which takes each name once."""
    requests, errors = (
        Counter(name, text, labels) for name, (text, labels) in HTTP_COUNTERS.items()
    )
    for rule in RULES:
        requests.labels(rule)
    return requests, errors
