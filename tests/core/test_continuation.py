from __future__ import annotations

import pytest

from ttlcache.programs.continuation import Relation, relate
from ttlcache.programs.model import Program, Turn
from ttlcache.programs.places import Place
from ttlcache.testing import chain_hashes
from ttlcache.types import GapKey

BLOCK = 2


def make_program(*turns):
    program = Program(("", "P"), place=Place(1))
    program.open_turns.extend(turns)
    return program


def make_turn(tokens, *, token=1, tool="search", pinned=True):
    hashes = chain_hashes(tokens, BLOCK)
    return Turn(
        token=token,
        finish_s=0.0,
        gap_key=GapKey(tool),
        context_tokens=len(tokens),
        num_hashes=len(hashes),
        last_hash=hashes[-1] if hashes else b"",
        hashes=hashes if pinned else (),
    )


def relation_of(program, prompt):
    return relate(program, chain_hashes(prompt, BLOCK), len(prompt))


def test_a_first_turn_branches():
    assert relation_of(make_program(), [1, 2, 3]).relation is Relation.BRANCHES


def test_a_prompt_that_extends_a_turn_continues_it():
    turn = make_turn([1, 2, 3, 4])
    found = relation_of(make_program(turn), [1, 2, 3, 4, 5])
    assert (found.relation, found.turn, found.shared_blocks) == (
        Relation.CONTINUES,
        turn,
        2,
    )


def test_the_longest_turn_wins_then_the_latest():
    short, long = make_turn([1, 2], token=2), make_turn([1, 2, 3, 4], token=1)
    assert relation_of(make_program(long, short), [1, 2, 3, 4, 5]).turn is long
    first, second = make_turn([1, 2], token=1), make_turn([1, 2], token=2)
    assert relation_of(make_program(second, first), [1, 2, 3]).turn is second


def test_parallel_branches_each_find_their_own_turn():
    left, right = make_turn([1, 2, 3, 4]), make_turn([1, 2, 5, 6])
    program = make_program(left, right)
    program.live_requests = 1
    assert relation_of(program, [1, 2, 3, 4, 9]).turn is left
    assert relation_of(program, [1, 2, 5, 6, 9]).turn is right


def test_a_rewritten_history_supersedes_and_says_what_is_shared():
    turn = make_turn([1, 2, 3, 4, 5, 6])
    found = relation_of(make_program(turn), [1, 2, 3, 4, 9, 9, 9, 9])
    assert (found.relation, found.turn, found.shared_blocks) == (
        Relation.SUPERSEDES,
        turn,
        2,
    )


def test_a_shortened_history_supersedes():
    turn = make_turn([1, 2, 3, 4, 5, 6])
    found = relation_of(make_program(turn), [1, 2, 3, 4])
    assert (found.relation, found.shared_blocks) == (Relation.SUPERSEDES, 2)


@pytest.mark.parametrize("tool", ["Task", "delegate_task"])
def test_a_sub_agent_leaves_its_parents_turn_alone(tool):
    turn = make_turn([1, 2, 3, 4], tool=tool)
    assert relation_of(make_program(turn), [1, 2, 9, 9]).relation is Relation.BRANCHES
    assert relation_of(make_program(turn), [1, 2, 3, 4, 5]).turn is turn


def test_while_another_request_is_under_way_a_new_prompt_branches():
    program = make_program(make_turn([1, 2, 3, 4]))
    program.live_requests = 1
    assert relation_of(program, [1, 2, 9, 9]).relation is Relation.BRANCHES


def test_a_prompt_that_shares_nothing_with_a_pinned_turn_branches():
    pinned = make_turn([1, 2, 3, 4])
    assert relation_of(make_program(pinned), [9, 9]).relation is Relation.BRANCHES


@pytest.mark.parametrize("prompt", [[1, 2, 9], [9, 9]])
def test_a_rewrite_of_an_unpinned_turn_ends_its_gap(prompt):
    # Its hashes are not kept, so nobody knows what is shared; but one turn after
    # the other under one id is a sequence, whatever the prompt looks like.
    turn = make_turn([1, 2, 3, 4], pinned=False)
    found = relation_of(make_program(turn), prompt)
    assert (found.relation, found.turn) == (Relation.SUPERSEDES, turn)
    assert found.shared_blocks is None


def test_a_rewrite_beside_other_open_turns_leaves_the_unpinned_one_open():
    turns = [make_turn([n, n, n, n], token=n, pinned=False) for n in (1, 2)]
    assert relation_of(make_program(*turns), [9, 9]).relation is Relation.BRANCHES


def test_a_sub_agent_leaves_its_parents_unpinned_turn_open():
    turn = make_turn([1, 2, 3, 4], tool="Task", pinned=False)
    assert relation_of(make_program(turn), [9, 9]).relation is Relation.BRANCHES
