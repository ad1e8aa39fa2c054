"""vLLM's request classes read a body after the middleware as they do before it.

In one process, over generated bodies: what `bench fuzz` asks of two servers.
"""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.v1.serial_utils import MsgpackEncoder

from bench.stress.fuzz.requests import CHAT, COMPLETIONS, RESPONSES, make
from tests.connector.conftest import pinned, totals
from tests.core.test_hints import nested
from ttlcache.programs.client_values import MAX_DEPTH, MAX_NESTED_SIZE
from ttlcache.programs.hints import MAX_KEY_CHARS
from ttlcache_connector.http.clues import from_body, with_hints
from ttlcache_connector.role.requests import MAX_LOGGED_KEYS

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


# --- what is wrong in a client's parameters, whatever way they came to the engine


@pytest.mark.parametrize(
    ("reason", "value"),
    [
        ("nested_too_deep", nested(500)),
        ("nested_too_deep", nested(5000)),
        ("nested_too_large", "x" * MAX_NESTED_SIZE),
    ],
)
def test_a_step_with_it_can_be_pickled(make_engine, reason, value):
    engine = make_engine()
    params = {"ttlcache": {"program_id": "p"}, "x": value}
    request = engine.add("r", range(64), kv_transfer_params=params)
    assert request.kv_transfer_params is None
    output = engine.step()
    assert len(pickle.dumps(output.scheduled_new_reqs)) < 10_000
    assert totals(engine)[f"hints_rejected:{reason}"] == 1


def test_what_fits_stays(make_engine):
    engine = make_engine()
    params = {
        "ttlcache": {"program_id": "p", "ttl": 60},
        "x": nested(MAX_DEPTH),
        "ids": list(range(100_000)),
    }
    request = engine.add("r", range(64), kv_transfer_params=params)
    assert request.kv_transfer_params == params
    pickle.dumps(engine.step().scheduled_new_reqs)
    engine.run()
    assert pinned(engine) > 0


def test_other_arguments_stay_and_retention_off_guards_as_well(make_engine):
    engine = make_engine()
    engine.connector.scheduler_role = None
    deep = {"x": nested(500)}
    params = SimpleNamespace(extra_args={"kv_transfer_params": deep, "top_a": 1})
    request = SimpleNamespace(sampling_params=params, kv_transfer_params=deep)
    engine.connector.on_new_request(request)
    assert params.extra_args == {"top_a": 1}
    assert request.kv_transfer_params is None


def test_a_misspelt_hint_is_named_once_and_costs_no_retention(make_engine, our_log):
    engine = make_engine()
    for number, key in enumerate(("programid", "programid", "\x1b[31m" + "x" * 999)):
        hints = {"tool": "bash", key: "p"}
        engine.turn(f"r{number}", [number] * 64, hints=hints)
    assert totals(engine)["hints_rejected:unknown_key"] == 3
    assert pinned(engine) > 0
    told = [line for line in our_log if "does not exist" in line]
    assert len(told) == 2
    assert "the hint 'programid'" in told[0]
    assert "did you mean 'program_id'?" in told[0]
    assert "valid: program_id, " in told[1]
    assert "\x1b" not in told[1]
    assert "x" * MAX_KEY_CHARS not in told[1]
    for number in range(20):
        made_up = {f"{number} made up {index}": 1 for index in range(8)}
        engine.turn(f"s{number}", [9] * 64, hints=made_up)
    told = [line for line in our_log if "does not exist" in line]
    assert len(told) == MAX_LOGGED_KEYS
