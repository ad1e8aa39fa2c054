"""Turns that wait below for their program's return."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.programs.model import Program, Turn
from ttlcache.programs.places import Place
from ttlcache.retention.pins import PinTable
from ttlcache.types import GapKey, PinOutcome
from ttlcache_connector.tiers import promotion

KEY = GapKey("bash", "sleep")
END_S = 5000.0  # of every turn here


@pytest.fixture
def promoter():
    """All gaps of its history last 600 s; its tier takes what it is told to."""
    gaps = GapHistory()
    for _ in range(50):
        gaps.observe(KEY, 600.0)
    told, tier = [], SimpleNamespace(takes=True)
    tier.promote = lambda *turn: told.append(turn) or tier.takes
    controller = SimpleNamespace(gaps=gaps, costs=CostModel())
    made = promotion.Promoter(tier, controller)
    made.told, made.tier, made.costs = told, tier, controller.costs
    return made


def expire(promoter, number, tokens=100, outcome=PinOutcome.EXPIRED, salt=None):
    """The first turn of a program has lost its pin, a second after its end."""
    program = Program(("", f"p{number}"), Place(number))
    turn = Turn(number, END_S, KEY, tokens)
    program.open_turns.append(turn)
    pin = PinTable().add(
        program, turn, kv_blocks=1, kv_tokens=16, now_s=END_S, ttl_s=1.0
    )
    request_id = f"r{number}"
    promoter.pinned(
        SimpleNamespace(
            request_id=request_id,
            all_token_ids=list(range(tokens + 1)),
            cache_salt=salt,
        )
    )
    promoter.pin_ended(pin, outcome, request_id, END_S + 1.0)
    return program


def promoted(promoter):
    return [request_id for request_id, _, _ in promoter.told]


def test_a_turn_is_promoted_a_moment_before_its_program_is_expected(promoter):
    expire(promoter, 0, tokens=100, salt="tenant")
    promoter.tick(END_S + 600.0 - promotion.LEAD_S - 0.1)
    assert promoter.told == []
    promoter.tick(END_S + 600.0 - promotion.LEAD_S)
    ((request_id, tokens, salt),) = promoter.told
    assert (request_id, list(tokens), salt) == ("r0", list(range(100)), "tenant")
    promoter.tick(END_S + 1000.0)
    assert len(promoter.told) == 1


def test_the_moment_is_as_long_as_reloads_from_disk_take(promoter):
    for _ in range(50):
        promoter.costs.observe_reload("disk", 100, 20.0)
    expire(promoter, 0, tokens=100)
    promoter.tick(END_S + 579.0)
    assert promoter.told == []
    promoter.tick(END_S + 581.0)
    assert promoted(promoter) == ["r0"]


def test_what_the_tier_cannot_take_now_is_asked_again(promoter):
    for number in range(2):
        expire(promoter, number)
    promoter.tier.takes = False
    promoter.tick(END_S + 1000.0)
    assert promoted(promoter) == ["r0"]
    promoter.tier.takes = True
    promoter.tick(END_S + 1001.0)
    assert promoted(promoter) == ["r0", "r0", "r1"]


@pytest.mark.parametrize("how", ["is back", "came and went", "is over"])
def test_who_needs_it_no_more_is_passed_over(promoter, how):
    program = expire(promoter, 0)
    expire(promoter, 1)
    if how == "is over":
        program.ended = True
    elif how == "is back":
        program.in_flight = 1  # the turn is open until its pin is claimed
    else:
        program.open_turns.clear()
    promoter.tick(END_S + 1000.0)
    assert promoted(promoter) == ["r1"]


@pytest.mark.parametrize(
    "outcome", [o for o in PinOutcome if o is not PinOutcome.EXPIRED]
)
def test_only_what_expired_comes_back(promoter, outcome):
    expire(promoter, 0, outcome=outcome)
    promoter.tick(END_S + 1000.0)
    assert promoter.told == []


def test_nothing_is_promoted_where_nobody_knows_when(promoter):
    promoter._controller.gaps = GapHistory()
    expire(promoter, 0)
    promoter.tick(END_S + 1e9)
    assert promoter.told == []


def test_what_waits_below_is_bounded_in_turns(promoter, monkeypatch):
    monkeypatch.setattr(promotion, "MAX_TURNS", 2)
    for number in range(4):
        expire(promoter, number)
    promoter.tick(END_S + 1000.0)
    assert promoted(promoter) == ["r0", "r1"]


def test_what_waits_below_is_bounded_in_tokens(promoter, monkeypatch):
    monkeypatch.setattr(promotion, "MAX_TOKENS", 250)
    for number in range(4):
        expire(promoter, number)
    promoter.tick(END_S + 1000.0)
    assert promoted(promoter) == ["r0", "r1"]
    assert list(promoter.told[0][1]) == list(range(100))
    expire(promoter, 4)  # there is room again
    promoter.tick(END_S + 1000.0)
    assert len(promoter.told) == 3
