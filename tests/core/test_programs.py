"""Which program is a request, and which programs are remembered."""

from types import SimpleNamespace

import pytest

from tests.fake_engine import chain_hashes
from ttlcache.programs import table as tables
from ttlcache.programs.hints import ROUTE_PREFIX
from ttlcache.programs.identity import Identifier
from ttlcache.programs.prefix_index import PrefixIndex
from ttlcache.programs.table import ProgramTable, client_key
from ttlcache.types import Arrival, Finish, Hints, IdentityRule

BLOCK = 4
PROMPT = [1, 2, 3, 4, 5]
HINT, SESSION = IdentityRule.HINT, IdentityRule.SESSION
PREFIX, NEW = IdentityRule.PREFIX, IdentityRule.NEW


@pytest.fixture
def identifier():
    programs = ProgramTable(max_programs=100, idle_s=100.0)
    return Identifier(programs, PrefixIndex(BLOCK))


def identify(
    identifier, tokens=PROMPT, now_s=0.0, program=None, session=None, tenant=""
):
    arrival = Arrival(
        request_id="r",
        num_tokens=len(tokens),
        hashes=chain_hashes(tokens, BLOCK, tenant),
        tokens=lambda start, stop: tokens[start:stop],
        hints=Hints(program_id=program),
        tenant=tenant,
        session_id=session,
    )
    return identifier.identify(arrival, now_s)


def remember(identifier, program, tenant=""):
    """A finished turn of `PROMPT`."""
    finish = Finish(
        request_id="finished",
        completed=True,
        num_tokens=len(PROMPT) + 1,  # the last one's KV does not exist
        prompt_tokens=len(PROMPT),
        hashes=chain_hashes(PROMPT, BLOCK, tenant),
        tokens=lambda start, stop: PROMPT[start:stop],
    )
    record = SimpleNamespace(program=program, stable_tokens=len(PROMPT))
    identifier.remember(record, finish)


@pytest.mark.parametrize(
    ("program", "session", "label", "rule"),
    [
        ("P", "S", "P", HINT),
        (None, "S", "S", SESSION),
        (None, "", "anonymous-0-1", NEW),
        # A routing key names nobody.
        (None, f"{ROUTE_PREFIX}0123", "anonymous-0-1", NEW),
    ],
)
def test_a_hint_outranks_a_session(identifier, program, session, label, rule):
    found, why = identify(identifier, program=program, session=session)
    assert (found.program_id, why) == (label, rule)


@pytest.mark.parametrize("session", [None, f"{ROUTE_PREFIX}0123"])
def test_a_growing_prompt_is_recognised_without_any_id(identifier, session):
    program, _ = identify(identifier, session=session)
    remember(identifier, program)
    # Two agents with one opening are sent to one replica; they stay two programs.
    other, rule = identify(identifier, [9, 9], session=session)
    assert rule is NEW
    assert other is not program
    again = identify(identifier, [*PROMPT, 6], 1.0, session=session)
    assert again == (program, PREFIX)
    assert program.last_seen_s == 1.0


def test_programs_with_an_id_are_not_guessed_by_prefix(identifier):
    program, _ = identify(identifier, program="P")
    remember(identifier, program)
    assert identify(identifier, [*PROMPT, 6])[1] is NEW


def test_tenants_do_not_see_each_other(identifier):
    mine, _ = identify(identifier, program="P", tenant="red")
    theirs, _ = identify(identifier, program="P", tenant="blue")
    assert mine is not theirs
    anonymous, _ = identify(identifier, tenant="red")
    remember(identifier, anonymous, tenant="red")
    assert identify(identifier, [*PROMPT, 6], tenant="blue")[1] is NEW


def test_a_huge_session_id_is_not_kept(identifier):
    huge = "s" * 1_000_000
    program, _ = identify(identifier, session=huge, tenant=huge)
    assert sum(map(len, program.key)) < 1000
    again, _ = identify(identifier, session=huge, tenant=huge)
    assert again is program


# --- the table ------------------------------------------------------------------

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


def test_a_table_full_of_busy_programs_waits():
    table = make_table(A, B, max_programs=1)
    for program in table:
        program.live_requests = 1
    assert forget(table, 3.0) == []
    assert len(table) == 2
    table.get(B).live_requests = 0
    assert forget(table, 3.0) + forget(table, 3.0) == ["B"]


@pytest.mark.parametrize("tenant", ["", "salt", "\0", "1"])
def test_no_client_key_is_that_of_an_anonymous_program(tenant):
    table = ProgramTable(max_programs=10, idle_s=1.0)
    program = table.create_anonymous(tenant, 2.0)
    assert (program.program_id, program.tenant) == ("anonymous-0-1", tenant)
    assert program.last_seen_s == 2.0
    for label in (program.program_id, "1"):
        assert table.get_or_create(client_key(tenant, label), 3.0) is not program
    assert table.get(program.key) is program


def test_two_engines_show_no_program_under_one_id():
    shown = []
    for engine_id in (0, 7, 0xABCDEF):
        table = ProgramTable(60.0, engine_id=engine_id)
        program = table.create_anonymous("", 0.0)
        assert table.find("", program.program_id) is program
        shown.append(program.program_id)
    assert shown == ["anonymous-0-1", "anonymous-7-1", "anonymous-abcdef-1"]


def test_client_keys_stay_apart_and_small():
    tenants = ["", "a", "\0", "\0a", "\0\0a", "x" * 300, "x" * 301, "\ud800" * 300]
    keys = {client_key(tenant, "p") for tenant in tenants}
    assert len(keys) == len(tenants)
    assert all(len(tenant) <= tables.MAX_KEY_CHARS for tenant, _ in keys)
    longest = "x" * tables.MAX_KEY_CHARS
    assert client_key("", longest) == ("", longest)


def test_tenants_are_counted_while_they_have_programs():
    table = make_table(("one", "A"), ("one", "B"), ("two", "A"))
    assert table.num_tenants(9.0) == 2
    first, last = table.get(("one", "A")), table.get(("two", "A"))
    for program in (first, last, last):
        table.remove(program)
    # Its next program may come.
    assert table.num_tenants(last.last_seen_s + tables.TENANT_MEMORY_S) == 2
    assert table.num_tenants(last.last_seen_s + tables.TENANT_MEMORY_S + 1) == 1
    table.create_anonymous("one", 9.0)
    assert table.num_tenants(9.0) == 1


def test_tenants_that_left_are_remembered_within_bounds():
    table = ProgramTable(60.0, 10)
    for number in range(3000):
        table.remove(table.get_or_create((f"salt-{number}", "A"), 1.0))
    assert table.num_tenants(1.0) == 1024
