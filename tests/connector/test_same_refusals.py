"""vLLM's request classes read a body after the middleware as they do before it.

In one process, over generated bodies: what `bench fuzz` asks of two servers.
"""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.v1.serial_utils import MsgpackEncoder

from bench.stress.fuzz.requests import CHAT, COMPLETIONS, RESPONSES, make
from ttlcache_connector.http.identity import from_body, with_hints

CLASSES = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatCompletionRequest,
    RESPONSES: ResponsesRequest,
}


def status(path: str, body: bytes) -> int:
    """What a server answers: 500 is what it does not foresee."""
    try:
        request = CLASSES[path](**json.loads(body))
        params = request.to_sampling_params(4, {})
        MsgpackEncoder().encode([params, request.session_id])
    except (RecursionError, UnicodeError, OverflowError):
        return 500
    except ValidationError as error:
        return 400 if is_utf8(str(error)) else 500
    except (ValueError, TypeError, VLLMValidationError):
        return 400
    return 200


def is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeError:
        return False
    return True


@pytest.mark.parametrize("first", range(0, 1500, 500))
def test_vllm_refuses_what_it_refused_before_and_nothing_else(first):
    answered = changed = 0
    for number in range(first, first + 500):
        request = make(number)
        path = next((path for path in CLASSES if request.path.endswith(path)), None)
        if path is None:
            continue
        body = with_hints(request.body, from_body(request.body))
        if body is None:
            continue
        plain, ours = status(path, request.body), status(path, body)
        assert ours == plain or plain == 500, request.body[:500]
        answered += ours == 200
        changed += 1
    assert changed > 20
    assert answered > 5
