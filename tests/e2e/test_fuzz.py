"""Some hundred generated requests to plain vLLM and to TTLConnector.

`python -m bench fuzz` plays 20,000 of them.
"""

import pytest

from bench.stress.fuzz.cli import WARM_UP, compare
from ttlcache_connector.http.asgi import MAX_BODY_BYTES

pytestmark = pytest.mark.e2e


@pytest.mark.nightly
def test_odd_requests_are_answered_as_plain_vllm_answers_them(tiny_model, tmp_path):
    rows, worse = compare(tiny_model, tmp_path, requests=WARM_UP + 200, seed=3)
    assert worse == []
    assert [row for row in rows if not row.ok] == []


DEEP = "[" * 500 + "]" * 500


@pytest.mark.parametrize(
    "member",
    [
        f'"job_id":{DEEP}',
        f'"this_func_call":{DEEP}',
        f'"last_func_call":{DEEP}',
        f'"is_last_step":{DEEP}',
        '"job_id":18446744073709551616',
        r'"job_id":"\ud800"',
        r'"session_id":"\ud800"',
        r'"kv_transfer_params":{"ttlcache":{"program_id":"\ud800"}}',
        r'"vllm_xargs":{"ttlcache_program_id":"\ud800"}',
        f'"kv_transfer_params":{{"x":{DEEP}}}',
        f'"kv_tr\\u0061nsfer_params":{{"x":{DEEP}}}',
        f'"ec_transfer_params":{{"x":{DEEP}}}',
        # Longer than the middleware reads: the engine itself has to see to it.
        f'"kv_transfer_params":{{"x":{DEEP}}},"y":"{"y" * MAX_BODY_BYTES}"',
    ],
    ids=lambda member: member[:40],
)
def test_no_request_ends_the_engine(agent, member):
    prompt = list(range(500, 540))  # more than a block: it is pinned
    body = f'{{"model":"tiny","prompt":{prompt},"max_tokens":1,{member}}}'
    headers = {"content-type": "application/json"}
    answer = agent.http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 200, answer.text[:500]
    agent.settle()
