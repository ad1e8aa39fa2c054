"""The proxy: requests go on with a routing key, answers come back as they are.

Nothing is read ahead but a generating request's body, as far as there is room.
Whatever goes wrong in finding a key costs the request its key, never its answer.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from urllib.parse import quote, unquote

import httpx

from ttlcache_connector.front.forward import (
    Upstream,
    base_url,
    end_to_end,
    refuse_body,
)
from ttlcache_connector.front.keys import HEADERLESS, Family, find, named, rank_of
from ttlcache_connector.front.prompts import PromptMemory
from ttlcache_connector.front.upload import (
    BodyError,
    ClientGoneError,
    Room,
    Upload,
)
from ttlcache_connector.http.asgi import (
    GENERATING,
    Receive,
    Scope,
    Send,
    answer,
    with_length,
)
from ttlcache_connector.http.billing_header import without_billing_header
from ttlcache_connector.http.clues import split_path
from ttlcache_connector.http.known_clients import SESSION_HEADER
from ttlcache_connector.http.naming import label

log = logging.getLogger(__name__)

RANK_HEADER = b"x-data-parallel-rank"
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
#: First parts of the paths that clients have a use for.
OPEN = frozenset(
    {"v1", "v2", "ttlcache", "health", "ping", "version", "tokenize", "detokenize"}
    | {"score", "rerank", "pooling", "classify", "metrics"}
)
#: vLLM's administration below one of them.
_CLOSED = frozenset({"load_lora_adapter", "unload_lora_adapter"})
_PROGRAM = re.compile(r"/ttlcache/programs/(.+)/(?:end|progress)")


class Front:
    """ASGI application before a router or before one vLLM.

    Args:
        upstream: base URL of the router.
        ranks: data-parallel ranks of the one vLLM behind; 0: none are named.
        client: what talks to the upstream; ours by default.
        room: what bodies may cost.

    Raises:
        ConfigError: no request can go to `upstream`.
    """

    def __init__(
        self,
        upstream: str,
        ranks: int = 0,
        client: httpx.AsyncClient | None = None,
        room: Room | None = None,
    ) -> None:
        self._upstream = Upstream(base_url(upstream), client)
        self._ranks = ranks
        self._family = Family()
        self._prompts = PromptMemory()
        self._room = room or Room()
        self._under_way = 0
        #: What `/front/status` tells: requests by where their key was found.
        self.routed: Counter[str] = Counter()
        self.faults = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] != "http":
            # That is 403; no answer is 500, and logged as an error.
            await send({"type": "websocket.close"})
        elif scope["path"].startswith("/front/"):
            await self._own(scope["path"], send)
        else:
            await self._pass_on(dict(scope), receive, send)

    def _may_pass(self, path: str) -> bool:
        """The router's and vLLM's own administration is not for clients."""
        parts = unquote(path).replace("\\", "/").split("/")
        if not path.startswith("/") or not {".", ".."}.isdisjoint(parts):
            return False  # what it means is decided elsewhere
        return parts[1] in OPEN and _CLOSED.isdisjoint(parts)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self._upstream.client:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _own(self, path: str, send: Send) -> None:
        if path == "/front/health":
            await answer(send, 200, {"status": "ok"})
        elif path == "/front/status":
            await answer(send, 200, self.status())
        else:
            await answer(send, 404, {"error": f"no such path: {path}"})

    def status(self) -> dict[str, object]:
        """Counters since the start, sizes of what is remembered."""
        return {
            "requests": dict(self.routed),
            "faults": self.faults,
            "upstream_errors": self._upstream.errors,
            "under_way": self._under_way,
            "held_bytes": self._room.held_bytes,
            "bodies_unread": self._room.unread,
            "bodies_late": self._room.late,
            "children": len(self._family),
            "prompts": len(self._prompts),
        }

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request to the upstream, its answer back."""
        # Raw: what is escaped in a path means something else than what is not.
        raw = scope.get("raw_path") or quote(scope["path"]).encode()
        session, scope["path"] = split_path(raw.decode("latin-1"))
        if not self._may_pass(scope["path"]):
            text = "the front passes this path on to nobody"
            await answer(send, 404, {"error": text})
            return
        upload = Upload(scope, receive, self._room)
        # Before ours are set: no client takes them away by naming them.
        scope["headers"] = end_to_end(scope["headers"])
        self._under_way += 1
        try:
            await self._route(scope, session, upload)
            await self._upstream.exchange(scope, upload, send)
        except ClientGoneError:
            pass
        except BodyError as error:
            await refuse_body(send, error)
        finally:
            self._under_way -= 1
            upload.end()

    async def _route(
        self, scope: Scope, url_session: str | None, upload: Upload
    ) -> None:
        """Sets the key in the request's headers, and an id in its body where needed."""
        generates = scope["method"] == "POST" and scope["path"] in GENERATING
        # Hints in a body outrank an id in headers: it is read whoever brings one.
        body = await upload.whole() if generates else None
        changed = None
        try:
            if generates:
                changed = self._route_turn(scope, url_session, body)
            else:
                self._route_other(scope, url_session)
        except Exception:  # without a key it still is a request
            self.faults += 1
            log.warning("no key for a request: it goes on without", exc_info=True)
        if changed is not None:
            upload.replace(changed)
        if body:
            length = len(body if changed is None else changed)
            scope["headers"] = with_length(scope["headers"], length)

    def _route_turn(
        self, scope: Scope, url_session: str | None, body: bytes | None
    ) -> bytes | None:
        """The body with an id in it, None where it stays as it is."""
        path = scope["path"]
        # As the replica reads it: the billing header may change with every request.
        as_read = body and (without_billing_header(body) or body)
        route = find(scope["headers"], url_session, as_read, self._prompts)
        self.routed[route.rule] += 1
        key = self._family.key(route, _tenant(scope))
        if key is None:
            return None
        # The replica takes the key for the program's id where the hints do not name
        # one, or it never sees it.
        unsaid = path in HEADERLESS and (route.hints or not route.in_body)
        mistaken = key != route.program and route.rule != "hint"
        session, changed = key, None
        if route.program and (mistaken or unsaid):
            changed = None if body is None else named(body, route.program, route.hints)
            if mistaken and changed is None:
                session = route.program  # it must be told in the header, then
        self._set_key(scope, session, key)
        return changed

    def _route_other(self, scope: Scope, url_session: str | None) -> None:
        """`/ttlcache/programs/{id}/end` goes where the program is."""
        match = _PROGRAM.fullmatch(scope["path"])
        program = label(unquote(match[1])) if match else url_session
        if program is not None:
            key = self._family.of(program, _tenant(scope))
            self._set_key(scope, key, key)

    def _set_key(self, scope: Scope, session: str, key: str) -> None:
        kept = [h for h in scope["headers"] if h[0].lower() != SESSION_HEADER]
        kept.append((SESSION_HEADER, session.encode()))
        if self._ranks and all(h[0].lower() != RANK_HEADER for h in kept):
            kept.append((RANK_HEADER, str(rank_of(key, self._ranks)).encode()))
        scope["headers"] = kept


def _tenant(scope: Scope) -> str:
    """Whose programs these are: what clients may know of each other's ids ends here."""
    told = [h[1] for h in scope["headers"] if h[0].lower() in _CREDENTIALS]
    return hashlib.blake2b(b"\0".join(told), digest_size=8).hexdigest() if told else ""
