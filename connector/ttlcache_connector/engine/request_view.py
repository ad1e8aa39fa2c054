"""What we read off vLLM's requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from ttlcache.estimators.step_fit import Step
from ttlcache.programs.client_values import MAX_DEPTH, fitting

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from ttlcache_connector.engine.tool_reader import OutputReader

#: In the ids of the requests that vLLM makes of one with beam search.
BEAM = "-beam-"
#: Finished normally; ignored and failed requests are not retained.
_COMPLETED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


def is_completed(request: Request, reader: OutputReader | None) -> bool:
    """Whether a request came to its end, as opposed to being given up.

    vLLM looks for stop strings in the API server and then aborts the request in the
    engine, as it does when a client is gone; only the output tells which it was.
    """
    if request.resumable or request.pooling_params is not None:
        return False
    if BEAM in request.request_id:
        return False  # one token of many continuations that vLLM itself asks for
    if request.status in _COMPLETED:
        return True
    params = request.sampling_params
    if request.status is not RequestStatus.FINISHED_ABORTED or params is None:
        return False
    if not params.stop or not request.num_output_tokens:
        return False
    return reader is not None and reader.holds_stop(request.output_token_ids, params)


def drop_unfit_args(request: Request) -> list[str]:
    """Take out of a request what its client nested too deep for vLLM's workers.

    They get requests by `pickle`, which gives up on it in the middle of a step, and the
    engine with it. Not every request came through our middleware.

    Returns:
        For each argument that is gone, why.
    """
    params = request.sampling_params
    if params is None or not params.extra_args:
        return []
    kept, reasons = fitting(params.extra_args, MAX_DEPTH + 1)
    if reasons:
        params.extra_args = kept
        request.kv_transfer_params = kept.get("kv_transfer_params")
        request.ec_transfer_params = kept.get("ec_transfer_params")
    return reasons


def is_prompt_done(request: Request) -> bool:
    """Whether all but the last token has its KV: what follows is decoding.

    A preempted request computes its own output again, as a part of its prompt.
    """
    return bool(request.num_computed_tokens >= request.num_tokens - 1)


def step_of(
    output: SchedulerOutput, prefilling: Iterable[Request], now_s: float
) -> Step:
    """What a step computes, before its requests' token counts are moved on.

    Args:
        prefilling: requests whose prompts may not be done.
    """
    scheduled = output.num_scheduled_tokens
    decodes, tokens = len(scheduled), output.total_num_scheduled_tokens
    prompts = []
    for request in prefilling:
        new = scheduled.get(request.request_id)
        if new is None or is_prompt_done(request):
            continue
        before = request.num_computed_tokens
        prompts.append((request.request_id, before, before + new))
        tokens -= new
    return Step(now_s, decodes - len(prompts), tokens, prompts)


def is_loading(request: Request) -> bool:
    return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def token_slice(request: Request) -> Callable[[int, int], Any]:
    return lambda start, stop: request.all_token_ids[start:stop]
