from __future__ import annotations

import pytest

from ttlcache.programs.continuation import shared_blocks
from ttlcache.programs.model import Program, Turn
from ttlcache.programs.table import (
    MAX_KEY_CHARS,
    TENANT_MEMORY_S,
    ProgramTable,
    client_key,
)
from ttlcache.testing import chain_hashes
from ttlcache.types import GapKey

A, B, C = ("", "A"), ("", "B"), ("", "C")


def make_table(*keys, max_programs=10, idle_s=100.0):
    """A table with one program per key, first seen at 1 s, 2 s, …"""
    table = ProgramTable(idle_s, max_programs)
    for second, key in enumerate(keys, start=1):
        table.get_or_create(key, float(second))
    return table


def forget(table, now_s):
    """Labels of the programs that a sweep removes."""
    forgotten = []
    for program in table.idle(now_s):
        table.remove(program)
        forgotten.append(program.program_id)
    return forgotten


def labels(table):
    return [program.program_id for program in table]


def test_programs_are_numbered_by_first_arrival():
    table = make_table(A, B)
    assert table.get_or_create(A, 3.0) is table.get(A)
    assert table.get(A).place.seq < table.get(B).place.seq
    assert table.get(A).last_seen_s == 3.0
    assert len(table) == 2


def test_an_id_is_a_label_inside_its_tenant():
    table = make_table(("red", "A"), ("blue", "A"))
    assert len(table) == 2
    assert table.get(("green", "A")) is None


def test_activity_moves_a_program_to_the_young_end():
    table = make_table(A, B, C)
    table.touch(table.get(A), 4.0)
    assert labels(table) == ["B", "C", "A"]


def test_a_removed_program_is_ended_and_succeeded_by_a_new_one():
    table = make_table(A)
    old = table.get(A)
    table.remove(old)
    assert old.ended
    new = table.get_or_create(A, 2.0)
    assert new is not old
    assert not new.ended
    # Requests of the old one are still under way: they change nothing any more.
    table.touch(old, 3.0)
    table.remove(old)
    assert table.get(A) is new
    assert new.last_seen_s == 2.0


def test_silent_programs_are_forgotten_oldest_first():
    table = make_table(A, B, C, idle_s=10.0)
    assert forget(table, 11.0) == []
    assert forget(table, 12.5) == ["A", "B"]
    assert labels(table) == ["C"]


def test_too_many_programs_are_forgotten_oldest_first():
    table = make_table(A, B, C, max_programs=1)
    assert forget(table, 3.0) == ["A", "B"]
    assert forget(ProgramTable(1.0, 1), 0.0) == []


def test_a_program_with_a_turn_in_flight_is_never_idle():
    table = make_table(A, B, idle_s=10.0)
    table.get(A).live_requests = 1
    assert forget(table, 50.0) == ["B"]
    assert labels(table) == ["A"]
    table.get(A).live_requests = 0
    assert forget(table, 59.0) == []  # its long turn counted as activity
    assert forget(table, 61.0) == ["A"]


def test_a_table_full_of_busy_programs_waits():
    table = make_table(A, B, max_programs=1)
    for program in table:
        program.live_requests = 1
    assert forget(table, 3.0) == []
    assert len(table) == 2
    table.get(B).live_requests = 0
    assert forget(table, 3.0) + forget(table, 3.0) == ["B"]


def test_a_clock_that_goes_back_ends_nothing():
    table = make_table(A, B, idle_s=10.0)
    table.touch(table.get(A), -500.0)
    assert forget(table, -499.0) == []
    assert forget(table, 100.0) == ["B", "A"]


@pytest.mark.parametrize("tenant", ["", "salt", "\0", "1"])
def test_no_client_key_is_that_of_an_anonymous_program(tenant):
    table = ProgramTable(max_programs=10, idle_s=1.0)
    program = table.create_anonymous(tenant, 2.0)
    assert (program.program_id, program.tenant) == ("anonymous-1", tenant)
    assert program.last_seen_s == 2.0
    for label in (program.program_id, "1"):
        assert table.get_or_create(client_key(tenant, label), 3.0) is not program
    assert table.get(program.key) is program


def test_client_keys_stay_apart_and_small():
    tenants = ["", "a", "\0", "\0a", "\0\0a", "x" * 300, "x" * 301, "\ud800" * 300]
    keys = {client_key(tenant, "p") for tenant in tenants}
    assert len(keys) == len(tenants)
    assert all(len(tenant) <= MAX_KEY_CHARS for tenant, _ in keys)
    assert client_key("", "x" * MAX_KEY_CHARS) == ("", "x" * MAX_KEY_CHARS)


def make_turn(tokens, block_tokens=2):
    hashes = chain_hashes(tokens, block_tokens)
    return Turn(
        token=1,
        finish_s=0.0,
        gap_key=GapKey("tool"),
        context_tokens=len(tokens),
        num_hashes=len(hashes),
        last_hash=hashes[-1] if hashes else b"",
    )


@pytest.mark.parametrize(
    ("prompt", "continues"),
    [
        ([1, 2, 3, 4, 5, 6], True),
        ([1, 2, 3, 4], True),
        ([1, 2, 3], False),
        ([1, 2, 3, 9, 5, 6], False),
        ([9, 2, 3, 4, 5, 6], False),
    ],
)
def test_a_prompt_continues_a_turn_whose_blocks_it_extends(prompt, continues):
    turn = make_turn([1, 2, 3, 4])
    assert turn.continued_by(chain_hashes(prompt, 2), len(prompt)) is continues


def test_a_turn_shorter_than_a_block_goes_by_length():
    turn = make_turn([1])
    assert turn.continued_by((), 1)
    assert not turn.continued_by((), 0)


def test_shared_blocks_agrees_with_counting():
    mine = chain_hashes(range(100), 1)
    for common in range(0, 101, 7):
        theirs = chain_hashes([*range(common), *range(500, 520)], 1)
        assert shared_blocks(mine, theirs) == common
        assert shared_blocks(theirs, mine) == common
    assert shared_blocks((), mine) == 0
    assert shared_blocks(mine, mine) == 100


def test_a_program_is_called_by_its_label():
    assert Program(("salt", "label"), 1).program_id == "label"


def test_tenants_are_counted_while_they_have_programs():
    table = make_table(("one", "A"), ("one", "B"), ("two", "A"))
    assert table.num_tenants(9.0) == 2
    left_s = table.get(("two", "A")).last_seen_s
    for key in (("one", "A"), ("two", "A"), ("two", "A")):
        program = table.get(key)
        if program is not None:
            table.remove(program)
            table.remove(program)
    # Its next program may come.
    assert table.num_tenants(left_s + TENANT_MEMORY_S) == 2
    assert table.num_tenants(left_s + TENANT_MEMORY_S + 1) == 1
    table.create_anonymous("one", 9.0)
    assert table.num_tenants(9.0) == 1


def test_tenants_that_left_are_remembered_within_bounds():
    table = ProgramTable(60.0, 10)
    for number in range(3000):
        table.remove(table.get_or_create((f"salt-{number}", "A"), 1.0))
    assert table.num_tenants(1.0) == 1024
