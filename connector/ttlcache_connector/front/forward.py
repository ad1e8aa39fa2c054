"""One request to the upstream, its answer back: as they came, piece by piece."""

from __future__ import annotations

import logging

import anyio
import httpx

from ttlcache.errors import ConfigError
from ttlcache_connector.front.upload import BodyError, ClientGoneError, Upload
from ttlcache_connector.http.asgi import Scope, Send, refuse

log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]

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
_LENGTH = b"content-length"
#: Our own lag counts, too: with 10 s a front that had too much to do sent 502.
_CONNECT_TIMEOUT_S = 30.0
#: For the upstream to take a piece of a body: what it does not take is held here.
_WRITE_TIMEOUT_S = 120.0
#: Shorter than the 5 s after which vLLM closes an idle connection.
_KEEPALIVE_S = 2.0
_EXPECTED = "an address such as http://127.0.0.1:8000"


class Upstream:
    """The router, or the one vLLM, behind the front.

    Args:
        url: its base URL.
        client: what talks to it; ours by default.
    """

    def __init__(self, url: httpx.URL, client: httpx.AsyncClient | None = None) -> None:
        self._url = url
        self.client = client or upstream_client()
        self.errors = 0

    async def exchange(self, scope: Scope, upload: Upload, send: Send) -> None:
        """The request goes up, the answer comes back; it ends where the client does.

        Of the request's headers all are sent: `end_to_end` before.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(upload.cancel_when_gone, tasks.cancel_scope)
            await self._exchange(scope, upload, send)
            tasks.cancel_scope.cancel()

    async def _exchange(self, scope: Scope, upload: Upload, send: Send) -> None:
        answer = await self._ask(scope, upload, send)
        if answer is None:
            return
        try:
            await self._give_back(answer, send)
        except httpx.HTTPError:
            # The status is out: the client can only see that the answer breaks off.
            self.errors += 1
            log.warning("an answer of the upstream broke off", exc_info=True)
        finally:
            with anyio.CancelScope(shield=True):
                await answer.aclose()

    async def _ask(
        self, scope: Scope, upload: Upload, send: Send
    ) -> httpx.Response | None:
        """The beginning of the upstream's answer; None where there is none to tell."""
        try:
            return await self.client.send(self._request(scope, upload), stream=True)
        except ClientGoneError:
            pass
        except BodyError as error:
            await refuse_body(send, error)
        except httpx.InvalidURL as error:
            await refuse(send, 400, "invalid_request_error", str(error), last=True)
        except (httpx.HTTPError, httpx.StreamError) as error:
            self.errors += 1
            text = f"the upstream did not answer: {type(error).__name__}: {error}"
            await refuse(send, 502, "upstream_error", text)
        finally:
            upload.end()
        return None

    async def _give_back(self, answer: httpx.Response, send: Send) -> None:
        """Chunk by chunk: `send` waits while the client is slow, and so do we."""
        headers = end_to_end(answer.headers.raw)
        if answer.has_redirect_location:
            headers = [(name, self._outside(name, value)) for name, value in headers]
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

    def _outside(self, name: bytes, value: bytes) -> bytes:
        """`Location` as clients can follow it: they do not reach the upstream."""
        base = self._url.raw_path.rstrip(b"/")
        whole = str(self._url).rstrip("/").encode()
        path = value.removeprefix(whole if value.startswith(whole) else base)
        # Two slashes would begin another host.
        is_path = path.startswith(b"/") and not path.startswith(b"//")
        return path if name.lower() == b"location" and is_path else value

    def _request(self, scope: Scope, upload: Upload) -> httpx.Request:
        # Not the client's own builder: it adds headers, such as encodings that this
        # client may not be able to undo.
        return httpx.Request(
            scope["method"],
            self._target(scope),
            headers=scope["headers"],
            content=upload.content(),
            extensions={"timeout": self.client.timeout.as_dict()},
        )

    def _target(self, scope: Scope) -> httpx.URL:
        raw = self._url.raw_path.rstrip(b"/") + scope["path"].encode("latin-1")
        query = scope.get("query_string", b"")
        return self._url.copy_with(raw_path=raw + (b"?" + query if query else b""))


def upstream_client() -> httpx.AsyncClient:
    """No limit of connections, none on how long an answer takes."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S, write=_WRITE_TIMEOUT_S),
        limits=httpx.Limits(
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=_KEEPALIVE_S,
        ),
        follow_redirects=False,
        trust_env=False,
    )


def end_to_end(headers: Headers) -> Headers:
    """The headers without those that are for the next hop alone.

    `Connection` names more of them (RFC 9110 §7.6.1). A length beside a transfer
    coding tells nothing (RFC 9112 §6.3); otherwise it stays, whoever names it, or the
    body would have no end.
    """
    dropped = set(_HOP_BY_HOP)
    for name, value in headers:
        if name.lower() == b"connection":
            dropped.update(part.strip().lower() for part in value.split(b","))
    coded = any(name.lower() == b"transfer-encoding" for name, _ in headers)
    dropped = dropped | {_LENGTH} if coded else dropped - {_LENGTH}
    return [h for h in headers if h[0].lower() not in dropped]


async def refuse_body(send: Send, error: BodyError) -> None:
    """To a client whose body did not come."""
    await refuse(send, error.status, error.kind, str(error), last=True)


def base_url(value: str) -> httpx.URL:
    """`--upstream` as a URL that requests can go to.

    Raises:
        ConfigError: none can; it names the option, the value and what was expected.
    """
    told = f"--upstream: {value!r}"
    try:
        url = httpx.URL(value.strip().rstrip("/"))
    except httpx.InvalidURL as error:
        raise ConfigError(f"{told}: {error}; expected {_EXPECTED}") from None
    for wrong, why in (
        (url.scheme not in ("http", "https"), "it does not begin with http://"),
        (not url.host or "%" in url.host, "it names no host"),
        (url.port is not None and not 0 < url.port < 2**16, "no such port"),
        (bool(url.query or url.fragment), "it has a query"),
        (bool(url.userinfo), "it names a user: clients' own keys go to the upstream"),
        (url.path.endswith("/v1"), "clients' paths begin with /v1, it must not end so"),
    ):
        if wrong:
            raise ConfigError(f"{told}: {why}; expected {_EXPECTED}")
    return url
