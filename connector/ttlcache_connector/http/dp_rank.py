"""`X-data-parallel-rank` for `/v1/responses`, where vLLM 0.32 does not read it.

0.33 does; what vLLM says by itself is left alone.
"""

from __future__ import annotations

from contextvars import ContextVar

from ttlcache_connector.engine import vllm_internals
from ttlcache_connector.http.asgi import Scope

RANK_HEADER = b"x-data-parallel-rank"
RESPONSES = "/v1/responses"
#: Of the request whose task this is, and of all tasks that it starts.
_rank: ContextVar[int | None] = ContextVar("ttlcache_rank", default=None)


def heed_rank(scope: Scope, path: str) -> dict[str, object] | None:
    """The engine client sends this request to the rank that its header names.

    Returns:
        vLLM's own answer, status 400, to a rank that there is not; None: go on. vLLM
        itself would find out in the middle of a stream, and break it.
    """
    # What a server starts from within another request's task has that one's rank.
    _rank.set(None)
    if path != RESPONSES:
        return None
    named = next(
        (value for name, value in scope["headers"] if name.lower() == RANK_HEADER), b""
    )
    try:
        rank = int(named.decode("latin-1"))
    except ValueError:
        return None  # vLLM takes it for none, too
    client = scope["app"].state.engine_client
    ranks = vllm_internals.count_ranks(client)
    if not 0 <= rank < ranks:
        text = f"data_parallel_rank {rank} is out of range [0, {ranks})."
        error = {"message": text, "type": "BadRequestError", "param": None, "code": 400}
        return {"error": error}
    vllm_internals.choose_rank(client, _rank.get)
    _rank.set(rank)
    return None
