"""`X-data-parallel-rank` for `/v1/responses`, where vLLM 0.30 to 0.32 do not read it.

0.33 does; what vLLM says by itself is left alone.
"""

from __future__ import annotations

from contextvars import ContextVar

from ttlcache_connector import compat
from ttlcache_connector.http_asgi import Scope

RANK_HEADER = b"x-data-parallel-rank"
RESPONSES = "/v1/responses"
#: Of the request whose task this is, and of all tasks that it starts.
_rank: ContextVar[int | None] = ContextVar("ttlcache_rank", default=None)


def heed_rank(scope: Scope, path: str) -> None:
    """The engine client sends this request to the rank that its header names.

    vLLM checks whether there is such a rank, as it does where it reads the header.
    """
    # What a server starts from within another request's task has that one's rank.
    _rank.set(None)
    if path != RESPONSES:
        return
    named = next(
        (value for name, value in scope["headers"] if name == RANK_HEADER), b""
    )
    if named.isdigit():
        compat.choose_rank(scope["app"].state.engine_client, _rank.get)
        _rank.set(int(named))
