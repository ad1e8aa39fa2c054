"""Greedy outputs with TTLConnector are vanilla vLLM's, token for token."""

from __future__ import annotations

import pytest

from tests.e2e.loads import record

pytestmark = pytest.mark.e2e


def test_tokens_and_first_logprobs_equal_vanilla(agent, vanilla):
    ours = record(agent, hints=True)
    for mine, theirs in zip(ours["programs"], vanilla["programs"], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a["token_ids"] == b["token_ids"]
            assert a["logprobs"][0] == pytest.approx(b["logprobs"][0], abs=1e-3)
    cached = [turn["cached_tokens"] for p in ours["programs"] for turn in p[1:]]
    # The pool holds six of the eight: a turn may find that its pin was a victim.
    assert sum(tokens > 0 for tokens in cached) > len(cached) / 2
    assert agent.pins("claimed") > 0
