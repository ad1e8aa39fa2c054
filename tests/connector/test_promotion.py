"""Turns that wait below for their program's return."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ttlcache.costs import CostModel
from ttlcache.gaps import GapHistory
from ttlcache.pins import PinTable
from ttlcache.programs import Program, Turn
from ttlcache.types import GapKey, PinOutcome
from ttlcache_connector import promotion

KEY = GapKey("bash", "sleep")


@pytest.fixture
def promoter():
    gaps = GapHistory()
    for _ in range(50):
        gaps.observe(KEY, 600.0)
    told = []
    tier = SimpleNamespace(promote=lambda *turn: told.append(turn) or True)
    controller = SimpleNamespace(gaps=gaps, costs=CostModel())
    made = promotion.Promoter(tier, controller)
    made.told = told
    return made


def expire(promoter, number, tokens=100):
    program, turn = Program(("", f"p{number}"), number), Turn(number, 0.0, KEY, tokens)
    pin = PinTable().add(program, turn, kv_blocks=1, kv_tokens=16, now_s=0.0, ttl_s=1.0)
    request_id = f"r{number}"
    promoter.pinned(
        SimpleNamespace(
            request_id=request_id,
            all_token_ids=list(range(tokens + 1)),
            cache_salt=None,
        )
    )
    promoter.pin_ended(pin, PinOutcome.EXPIRED, request_id, 1.0)


def test_what_waits_below_is_bounded_in_tokens(promoter, monkeypatch):
    monkeypatch.setattr(promotion, "MAX_TOKENS", 250)
    for number in range(4):
        expire(promoter, number)
    promoter.tick(1000.0)
    assert [request_id for request_id, _, _ in promoter.told] == ["r0", "r1"]
    assert list(promoter.told[0][1]) == list(range(100))
    expire(promoter, 4)  # there is room again
    promoter.tick(1000.0)
    assert len(promoter.told) == 3
