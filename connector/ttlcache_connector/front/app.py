"""The proxy: requests go on with a routing key, answers come back as they are.

Nothing is buffered but a generating request's body, up to the middleware's bound.
Whatever goes wrong in finding a key costs the request its key, never its answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from urllib.parse import quote, unquote

import anyio
import httpx

from ttlcache_connector.front.keys import HEADERLESS, find, named, rank_of
from ttlcache_connector.front.prompts import PromptMemory
from ttlcache_connector.front.replicas import Replicas
from ttlcache_connector.front.routes import Family
from ttlcache_connector.front.upload import ClientGoneError, Upload
from ttlcache_connector.http_asgi import (
    GENERATING,
    Receive,
    Scope,
    Send,
    read_body,
    with_length,
)
from ttlcache_connector.http_identity import SESSION_HEADER, label, split_path

log = logging.getLogger(__name__)

RANK_HEADER = b"x-data-parallel-rank"
#: Told hop by hop, not end to end (RFC 9110 §7.6.1); the host is the upstream's.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"host",
    }
)
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
#: First parts of the paths that clients have a use for.
OPEN = frozenset(
    {"v1", "v2", "ttlcache", "health", "ping", "version", "tokenize", "detokenize"}
    | {"score", "rerank", "pooling", "classify", "metrics"}
)
_PROGRAM = re.compile(r"/ttlcache/programs/(.+)/(?:end|progress)")
_CONNECT_TIMEOUT_S = 10.0
#: Shorter than the 5 s after which vLLM closes an idle connection.
_KEEPALIVE_S = 2.0


class Front:
    """ASGI application before a router or before one vLLM.

    Args:
        upstream: base URL of the router.
        replicas: asked whether a sub-agent may follow its parent.
        ranks: data-parallel ranks of the one vLLM behind; 0: none are named.
        every_path: pass on the upstream's administration, too.
        client: what talks to the upstream; ours by default.
    """

    def __init__(
        self,
        upstream: str,
        replicas: Replicas,
        ranks: int = 0,
        client: httpx.AsyncClient | None = None,
        *,
        every_path: bool = False,
    ) -> None:
        self._every_path = every_path
        self._upstream = httpx.URL(upstream.rstrip("/"))
        self._ranks = ranks
        self._replicas = replicas
        self._family = Family(replicas.is_over)
        self._prompts = PromptMemory()
        self._client = client or upstream_client()
        #: What `/front/status` tells: requests by where their key was found.
        self.routed: Counter[str] = Counter()
        self.faults = 0
        self.upstream_errors = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] != "http":
            return  # a WebSocket handshake without an answer is refused
        elif scope["path"].startswith("/front/"):
            await self._own(scope["path"], send)
        else:
            await self._pass_on(dict(scope), receive, send)

    def _may_pass(self, path: str) -> bool:
        """The router's and vLLM's own administration is not for clients."""
        parts = unquote(path).replace("\\", "/").split("/")
        if not path.startswith("/") or not {".", ".."}.isdisjoint(parts):
            return False  # what it means is decided elsewhere
        return self._every_path or parts[1] in OPEN

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self._client, self._replicas.watching():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _own(self, path: str, send: Send) -> None:
        if path == "/front/health":
            await _answer(send, 200, {"status": "ok"})
        elif path == "/front/status":
            await _answer(send, 200, self.status())
        else:
            await _answer(send, 404, {"error": f"no such path: {path}"})

    def status(self) -> dict[str, object]:
        """Counters since the start, sizes of what is remembered, last pressures."""
        return {
            "requests": dict(self.routed),
            "faults": self.faults,
            "upstream_errors": self.upstream_errors,
            "children": len(self._family),
            "children_sent_away": self._family.sent_away,
            "prompts": len(self._prompts),
            "pressure": self._replicas.pressure,
        }

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request to the upstream, its answer back."""
        messages, body = await read_body(receive)
        if messages[-1]["type"] == "http.disconnect":
            return
        # Raw: what is escaped in a path means something else than what is not.
        raw = scope.get("raw_path") or quote(scope["path"]).encode()
        session, scope["path"] = split_path(raw.decode("latin-1"))
        if not self._may_pass(scope["path"]):
            await _answer(
                send, 404, {"error": "the front passes this path on to nobody"}
            )
            return
        try:
            body = await self._route(scope, session, body)
        except Exception:  # without a key it still is a request
            self.faults += 1
            log.warning("no key for a request: it goes on without", exc_info=True)
        if body:
            scope["headers"] = with_length(scope["headers"], len(body))
        upload = Upload(messages, receive, body)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(upload.cancel_when_gone, tasks.cancel_scope)
            await self._forward(scope, upload, send)
            tasks.cancel_scope.cancel()

    async def _route(
        self, scope: Scope, url_session: str | None, body: bytes | None
    ) -> bytes | None:
        """Sets the key in the request's headers; the body, with an id where needed."""
        path = scope["path"]
        if scope["method"] != "POST" or path not in GENERATING:
            self._route_other(scope, url_session)
            return body
        route = find(scope["headers"], url_session, body, self._prompts)
        self.routed[route.rule] += 1
        key = await self._family.key(route, _tenant(scope))
        if key is None:
            return body
        self._set_key(scope, key)
        # The replica takes the key for the program's id where the hints do not name
        # one, or it never sees it.
        unsaid = path in HEADERLESS and not route.in_body
        mistaken = key != route.program and route.rule != "hint"
        if body is not None and route.program and (mistaken or unsaid):
            return named(body, route.program)
        return body

    def _route_other(self, scope: Scope, url_session: str | None) -> None:
        """`/ttlcache/programs/{id}/end` goes where the program is."""
        match = _PROGRAM.fullmatch(scope["path"])
        program = label(unquote(match[1])) if match else url_session
        if program is not None:
            self._set_key(scope, self._family.of(program, _tenant(scope)))

    def _set_key(self, scope: Scope, key: str) -> None:
        kept = [h for h in scope["headers"] if h[0].lower() != SESSION_HEADER]
        kept.append((SESSION_HEADER, key.encode()))
        if self._ranks and all(h[0].lower() != RANK_HEADER for h in kept):
            kept.append((RANK_HEADER, str(rank_of(key, self._ranks)).encode()))
        scope["headers"] = kept

    async def _forward(self, scope: Scope, upload: Upload, send: Send) -> None:
        # Not the client's own builder: it adds headers, such as encodings that this
        # client may not be able to undo.
        request = httpx.Request(
            scope["method"],
            self._url(scope),
            headers=[h for h in scope["headers"] if h[0].lower() not in _HOP_BY_HOP],
            content=upload.content,
            extensions={"timeout": self._client.timeout.as_dict()},
        )
        try:
            answer = await self._client.send(request, stream=True)
        except ClientGoneError:
            return
        except httpx.HTTPError as error:
            self.upstream_errors += 1
            text = f"the upstream did not answer: {type(error).__name__}: {error}"
            body = {"message": text, "type": "upstream_error", "code": 502}
            await _answer(send, 502, {"error": body})
            return
        try:
            await _give_back(answer, send)
        except httpx.HTTPError:
            # The status is out: the client can only see that the answer breaks off.
            self.upstream_errors += 1
            log.warning("an answer of the upstream broke off", exc_info=True)
        finally:
            with anyio.CancelScope(shield=True):
                await answer.aclose()

    def _url(self, scope: Scope) -> httpx.URL:
        raw = self._upstream.raw_path.rstrip(b"/") + scope["path"].encode("latin-1")
        query = scope.get("query_string", b"")
        return self._upstream.copy_with(raw_path=raw + (b"?" + query if query else b""))


def upstream_client() -> httpx.AsyncClient:
    """No limit of connections, none on how long an answer takes."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
        limits=httpx.Limits(
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=_KEEPALIVE_S,
        ),
        follow_redirects=False,
        trust_env=False,
    )


def _tenant(scope: Scope) -> str:
    """Whose programs these are: what clients may know of each other's ids ends here."""
    told = [h[1] for h in scope["headers"] if h[0].lower() in _CREDENTIALS]
    return hashlib.blake2b(b"\0".join(told), digest_size=8).hexdigest() if told else ""


async def _give_back(answer: httpx.Response, send: Send) -> None:
    """Chunk by chunk: `send` waits while the client is slow, and so do we."""
    headers = [h for h in answer.headers.raw if h[0].lower() not in _HOP_BY_HOP]
    await send(
        {
            "type": "http.response.start",
            "status": answer.status_code,
            "headers": [(name.lower(), value) for name, value in headers],
        }
    )
    # Raw: an encoding of the upstream's is the client's to undo.
    async for chunk in answer.aiter_raw():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _answer(send: Send, status: int, content: object) -> None:
    body = json.dumps(content).encode()
    headers = with_length([(b"content-type", b"application/json")], len(body))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
