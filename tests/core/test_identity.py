from __future__ import annotations

import pytest

from ttlcache.programs.hints import ROUTE_PREFIX
from ttlcache.programs.identity import Identifier
from ttlcache.programs.prefix_index import PrefixIndex
from ttlcache.programs.table import ProgramTable
from ttlcache.testing import chain_hashes
from ttlcache.types import Arrival, Finish, Hints, IdentityRule

BLOCK = 4
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def programs():
    return ProgramTable(max_programs=100, idle_s=100.0)


@pytest.fixture
def identifier(programs):
    return Identifier(programs, PrefixIndex(BLOCK))


def arrival(tokens=PROMPT, *, program=None, session=None, tenant=""):
    return Arrival(
        request_id="r",
        num_tokens=len(tokens),
        hashes=chain_hashes(tokens, BLOCK, tenant),
        tokens=lambda start, stop: tokens[start:stop],
        hints=Hints(program_id=program),
        tenant=tenant,
        session_id=session,
    )


def remember(identifier, program, tokens, tenant=""):
    identifier.remember(
        program,
        Finish(
            request_id="finished",
            completed=True,
            num_tokens=len(tokens) + 1,  # the last one's KV does not exist
            prompt_tokens=len(tokens),
            hashes=chain_hashes(tokens, BLOCK, tenant),
            tokens=lambda start, stop: tokens[start:stop],
        ),
    )


def test_a_hint_outranks_a_session(identifier):
    program, rule = identifier.identify(arrival(program="P", session="S"), 0.0)
    assert (program.program_id, rule) == ("P", IdentityRule.HINT)
    program, rule = identifier.identify(arrival(session="S"), 0.0)
    assert (program.program_id, rule) == ("S", IdentityRule.SESSION)


def test_the_same_id_is_the_same_program(identifier):
    first, _ = identifier.identify(arrival(program="P"), 0.0)
    again, rule = identifier.identify(arrival([9], session="P"), 1.0)
    assert again is first
    assert rule is IdentityRule.SESSION
    assert first.last_seen_s == 1.0


def test_a_growing_prompt_is_recognised_without_any_id(identifier):
    program, rule = identifier.identify(arrival(), 0.0)
    assert rule is IdentityRule.NEW
    remember(identifier, program, PROMPT)
    again, rule = identifier.identify(arrival([*PROMPT, 6]), 1.0)
    assert again is program
    assert rule is IdentityRule.PREFIX
    assert program.last_seen_s == 1.0


def test_an_empty_session_id_is_none(identifier):
    _, rule = identifier.identify(arrival(session=""), 0.0)
    assert rule is IdentityRule.NEW


def test_programs_with_an_id_are_not_guessed_by_prefix(identifier):
    program, _ = identifier.identify(arrival(program="P"), 0.0)
    remember(identifier, program, PROMPT)
    _, rule = identifier.identify(arrival([*PROMPT, 6]), 0.0)
    assert rule is IdentityRule.NEW


def test_tenants_do_not_see_each_other(identifier):
    mine, _ = identifier.identify(arrival(program="P", tenant="red"), 0.0)
    theirs, _ = identifier.identify(arrival(program="P", tenant="blue"), 0.0)
    assert mine is not theirs
    anonymous, _ = identifier.identify(arrival(tenant="red"), 0.0)
    remember(identifier, anonymous, PROMPT, tenant="red")
    _, rule = identifier.identify(arrival([*PROMPT, 6], tenant="blue"), 0.0)
    assert rule is IdentityRule.NEW


def test_a_routing_key_names_nobody(identifier):
    # Two agents with one opening are sent to one replica; they stay two programs.
    key = f"{ROUTE_PREFIX}0123"
    one, rule = identifier.identify(arrival(session=key), 0.0)
    assert rule is IdentityRule.NEW
    remember(identifier, one, PROMPT)
    two, rule = identifier.identify(arrival([9, 9], session=key), 0.0)
    assert rule is IdentityRule.NEW
    assert two is not one
    again, rule = identifier.identify(arrival([*PROMPT, 6], session=key), 0.0)
    assert again is one
    assert rule is IdentityRule.PREFIX


def test_a_client_cannot_name_an_anonymous_program(identifier):
    # Scenario:
    #   1. An anonymous program gets the id that we make up for it.
    #   2. A client sends that id.
    #   3. It gets a program of its own: it could end the other one.
    victim, _ = identifier.identify(arrival(), 0.0)
    label = victim.program_id
    stranger, _ = identifier.identify(arrival(program=label), 0.0)
    assert stranger is not victim


def test_a_huge_session_id_is_not_kept(identifier):
    huge = "s" * 1_000_000
    program, _ = identifier.identify(arrival(session=huge, tenant=huge), 0.0)
    assert sum(map(len, program.key)) < 1000
    again, _ = identifier.identify(arrival(session=huge, tenant=huge), 0.0)
    assert again is program
