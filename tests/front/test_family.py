"""Sub-agents follow their parent; programs without an id are known by their prompts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttlcache_connector.front.keys import Family, Route
from ttlcache_connector.front.prompts import (
    MAX_BRANCHES,
    MAX_SAME_STEPS,
    STEP_BYTES,
    PromptMemory,
)


def key(family: Family, name: str, parent: str | None, tenant: str = "") -> str | None:
    return family.key(Route("hint", name, name, parent), tenant)


def test_a_child_goes_where_its_parent_went():
    family = Family()
    assert key(family, "a", "p") == "p"
    assert key(family, "grandchild", "a") == "p"
    assert key(family, "b", None) == "b"
    assert key(family, "b", "p") == "b", "its KV is there"
    assert key(family, "a", None) == "p", "a turn that does not tell its parent"
    assert key(family, "p", "p") == "p"
    assert family.of("a") == family.of("p") == "p"


@pytest.mark.parametrize("parent", ["p", None])
def test_what_is_remembered_has_a_bound(parent):
    family = Family(max_programs=10)
    for number in range(100):
        name = f"c{number}"
        assert key(family, name, parent) == (parent or name)
    assert family.key(Route()) is None
    assert len(family) == 10
    assert family.of("c99") == (parent or "c99")


def test_nobody_sends_another_ones_program_away():
    family = Family()
    assert key(family, "victim", None) == "victim"
    assert key(family, "victim", "attacker") == "victim", "it was no child before"
    assert key(family, "later", "attacker", "A") == "attacker"
    assert key(family, "later", None, "B") == "later", "another tenant's"
    assert family.of("later", "B") == "later"
    assert family.of("later", "A") == "attacker"


# --- programs told apart by their prompts alone


#: Longer than a step, and shorter.
SYSTEMS = (b"", b"s" * 100, b"s" * STEP_BYTES, b"s" * (3 * STEP_BYTES + 7))


def grown(program: int, turn: int, system: bytes = b"") -> bytes:
    rng = random.Random(program)
    return system + b"%d " % program + bytes(rng.choices(range(256), k=700 * turn + 30))


def test_a_growing_prompt_keeps_its_key():
    for system in SYSTEMS:
        memory = PromptMemory()
        keys: dict[int, set[str]] = {}
        for turn in range(6):
            for program in range(50):
                key = memory.key(grown(program, turn, system))
                keys.setdefault(program, set()).add(key)
        assert all(len(own) == 1 for own in keys.values())
        assert len({min(own) for own in keys.values()}) == 50


def test_the_same_turn_again_is_the_same_program():
    memory = PromptMemory()
    key = memory.key(grown(1, 2))
    assert [memory.key(grown(1, 2)) for _ in range(3 * MAX_BRANCHES)] == [key] * 24
    assert len(memory) == 1
    assert memory.key(grown(1, 3)) == key


def test_what_many_go_on_from_is_no_program():
    """Somebody sent the bare system prompt: it must not draw everybody to one key."""
    memory = PromptMemory()
    system = SYSTEMS[3]
    memory.key(system)
    keys = {memory.key(grown(program, 1, system)) for program in range(100)}
    assert len(keys) == 100 - MAX_BRANCHES + 1


def test_memory_is_bounded():
    memory = PromptMemory(max_prompts=100)
    for program in range(1000):
        memory.key(grown(program, 1))
        memory.key(b"%d" % program)
    assert len(memory) <= 100
    held = sum(map(len, memory._by_steps.values()))
    assert held == len(memory)
    for number in range(3 * MAX_SAME_STEPS):
        memory.key(b"s" * STEP_BYTES + b"%d" % number)
    assert max(map(len, memory._by_steps.values())) <= MAX_SAME_STEPS


@given(st.lists(st.binary(max_size=40).map(lambda b: b * 40), min_size=1, max_size=30))
def test_a_key_is_shared_by_prefixes_only(prompts):
    """Programs of one key form one family: each goes on from one seen before."""
    memory = PromptMemory()
    families: dict[str, list[bytes]] = {}
    for prompt in prompts:
        family = families.setdefault(memory.key(prompt), [])
        assert not family or any(prompt.startswith(known) for known in family)
        family.append(prompt)
    assert len(memory) == sum(map(len, memory._by_steps.values()))
