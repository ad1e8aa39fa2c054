"""What we read off vLLM's requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Finished normally; aborted, ignored and failed requests are not retained.
COMPLETED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


def is_loading(request: Request) -> bool:
    return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def no_blocks(block_ids: tuple[list[int], ...]) -> tuple[list[int], ...]:
    return tuple([] for _ in block_ids)


def token_slice(request: Request) -> Callable[[int, int], Any]:
    return lambda start, stop: request.all_token_ids[start:stop]
