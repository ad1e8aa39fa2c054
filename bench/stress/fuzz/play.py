"""Plays the requests against one server each, and compares the answers."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from bench.stress.fuzz.requests import FuzzRequest, make

WORKERS = 12
TIMEOUT_S = 300.0
_TOKENS = re.compile(rb'"token_ids":\s?\[([\d, ]*)\]')
_STREAM_ERROR = re.compile(rb'^data: {"error":.*"code":\s?(\d+)}', re.MULTILINE)
_TEXT = re.compile(rb'"text":\s?("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, as far as it is compared.

    status: 0 where no answer came; of a stream that reports an error the error's.
    output: token ids or text of a 200.
    """

    status: int
    output: str


class Client:
    """Connections of one thread each to one server."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._local = threading.local()

    def send(self, request: FuzzRequest, path: str) -> Answer:
        """One answer; a kept connection that was closed meanwhile is made anew."""
        for last in (False, True):
            try:
                return self._send(request, path)
            except (OSError, http.client.HTTPException):
                self._close()
                if last:
                    return Answer(0, "")
        raise AssertionError

    def _send(self, request: FuzzRequest, path: str) -> Answer:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
            self._local.connection = connection
        connection.putrequest(request.method, path)
        for name, value in request.headers:
            connection.putheader(name.decode(), value)
        connection.putheader("Content-Length", str(len(request.body)))
        connection.endheaders(request.body)
        response = connection.getresponse()
        content = response.read()
        if response.will_close:
            self._close()
        return read_answer(response.status, content)

    def _close(self) -> None:
        connection = getattr(self._local, "connection", None)
        self._local.connection = None
        if connection is not None:
            connection.close()


def play(
    base_url: str,
    numbers: Iterable[int],
    path_of: Callable[[FuzzRequest], str | None],
    seed: int = 0,
) -> dict[int, Answer]:
    """Answers by the request's number; those without a path are left out."""
    client = Client(base_url)
    answers: dict[int, Answer] = {}

    def one(number: int) -> None:
        request = make(number, seed)
        path = path_of(request)
        if path is not None:
            answers[request.number] = client.send(request, path)

    with ThreadPoolExecutor(WORKERS) as pool:
        for _ in pool.map(one, numbers):
            pass
    return answers


def is_same(request: FuzzRequest, plain: Answer | None, ours: Answer) -> bool:
    """Whether our answer is as good as plain vLLM's: the same where that answers."""
    if not ours.status:
        return False
    if plain is None:
        # Nobody to compare with: a control route, or what plain vLLM would die of.
        is_control = "/ttlcache/" in request.path
        return ours.status < 500 or not is_control
    if plain.status >= 500 or not plain.status:
        return True
    return ours == plain


def differences(
    plain: Mapping[int, Answer], ours: Mapping[int, Answer], seed: int = 0
) -> list[FuzzRequest]:
    """The requests that were answered worse by us."""
    requests = (make(number, seed) for number in sorted(ours))
    return [r for r in requests if not is_same(r, plain.get(r.number), ours[r.number])]


def describe(request: FuzzRequest, plain: Answer | None, ours: Answer) -> str:
    """One line about a request that was answered differently."""
    body = request.body
    short = body if len(body) <= 400 else body[:250] + b" ... " + body[-150:]
    return (
        f"#{request.number} {request.method} {request.path[:80]} "
        f"{request.headers[1:]!r:.200}: plain {plain}, ours {ours}, {short!r}"
    )


def read_answer(status: int, content: bytes) -> Answer:
    """What was generated: token ids where they are told, else the text."""
    if status != 200:
        return Answer(status, "")
    error = _STREAM_ERROR.search(content)
    if error is not None:
        return Answer(int(error[1]), "")
    found = _TOKENS.findall(content)
    if found:
        tokens = b",".join(part for part in found if part)
        return Answer(status, tokens.decode().replace(" ", ""))
    return Answer(status, b"".join(_TEXT.findall(content)).decode())
