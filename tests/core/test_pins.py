from __future__ import annotations

import math

import pytest

from ttlcache.programs.model import Program, Turn
from ttlcache.programs.places import Place
from ttlcache.retention.pins import PinTable
from ttlcache.types import GapKey


def make_program(seq, priority_class=0):
    program = Program(("", f"P{seq}"), place=Place(seq))
    program.priority_class = priority_class
    return program


def make_turn():
    return Turn(1, 0.0, GapKey("tool"), context_tokens=8, hashes=[b"a", b"b"])


def add(pins, program, blocks=2, ttl_s=10.0, now_s=0.0):
    return pins.add(
        program,
        make_turn(),
        kv_blocks=blocks,
        kv_tokens=blocks * 4,
        now_s=now_s,
        ttl_s=ttl_s,
    )


def ids(pins):
    return [pin.pin_id for pin in pins]


def test_a_pin_lives_from_add_to_remove():
    pins = PinTable()
    pin = add(pins, make_program(1), blocks=3, ttl_s=2.0, now_s=5.0)
    assert (pin.created_s, pin.deadline_s, pins.kv_blocks) == (5.0, 7.0, 3)
    assert pins.get(pin.pin_id) is pin
    assert pin.turn.pin_id == pin.pin_id
    assert list(pins) == [pin]

    pins.remove(pin)
    assert len(pins) == 0
    assert pins.kv_blocks == 0
    assert pins.get(pin.pin_id) is None
    assert pin.turn.pin_id is None
    assert pin.turn.hashes == ()  # kept for pinned turns only
    assert pins.next_deadline_s() is None
    assert list(pins.victims()) == []


def test_no_pin_has_no_pin():
    assert PinTable().get(None) is None


def test_pins_expire_at_their_deadline_oldest_first():
    pins, program = PinTable(), make_program(1)
    late, soon, same = (add(pins, program, ttl_s=t) for t in (9.0, 3.0, 3.0))
    assert pins.next_deadline_s() == 3.0
    assert pins.expired(2.9) == []
    assert pins.expired(3.0) == [soon, same]
    assert pins.expired(99.0) == [soon, same, late]


def test_a_pin_without_end_never_expires():
    pins = PinTable()
    add(pins, make_program(1), ttl_s=math.inf)
    assert pins.expired(1e300) == []


def test_an_awaited_pin_does_not_expire_until_nobody_waits():
    pins = PinTable()
    pin = add(pins, make_program(1), ttl_s=3.0)
    pins.add_waiter(pin, "r1")
    pins.add_waiter(pin, "r2")
    assert pins.next_deadline_s() is None
    pins.remove_waiter(pin, "r1")
    pins.remove_waiter(pin, "never waited for it")
    assert pins.expired(9.0) == []
    pins.remove_waiter(pin, "r2")
    assert not pin.is_awaited
    assert pins.expired(9.0) == [pin]


def test_an_awaited_pin_can_be_removed():
    pins = PinTable()
    pin = add(pins, make_program(1))
    pins.add_waiter(pin, "r1")
    pins.remove(pin)
    assert len(pins) == 0
    assert list(pins.victims()) == []


def test_deciding_again_moves_the_deadline():
    pins, program = PinTable(), make_program(1)
    first, second = add(pins, program, ttl_s=3.0), add(pins, program, ttl_s=5.0)
    pins.set_deadline(first, 8.0)
    assert pins.expired(6.0) == [second]
    pins.add_waiter(second, "r")
    pins.set_deadline(second, 20.0)
    assert pins.next_deadline_s() == 8.0
    pins.remove_waiter(second, "r")
    assert pins.expired(19.0) == [first]


def test_victims_are_the_latest_programs_first_and_awaited_pins_last():
    pins, old, young = PinTable(), make_program(1), make_program(2)
    of_old, first, second = add(pins, old), add(pins, young), add(pins, young)
    assert list(pins.victims()) == [second, first, of_old]
    pins.add_waiter(second, "r")
    assert list(pins.victims()) == [first, of_old, second]
    pins.remove_waiter(second, "r")
    assert list(pins.victims()) == [second, first, of_old]


def test_a_lower_class_goes_before_a_higher_one():
    pins = PinTable()
    high = add(pins, make_program(3, priority_class=1))
    low = add(pins, make_program(1, priority_class=-1))
    normal = add(pins, make_program(2))
    assert list(pins.victims()) == [low, normal, high]


@pytest.mark.parametrize("action", ["remove", "hold", "unhold"])
def test_a_program_that_changes_its_class_does_not_lose_its_pins(action):
    # Scenario:
    #   1. A turn is pinned while its program has class 0.
    #   2. The program's next request names class 5.
    #   3. The pin is still found in the order of victims, and goes cleanly.
    pins = PinTable()
    programs = [make_program(seq) for seq in range(1, 9)]
    for program in programs:
        pin = add(pins, program)
        if action == "unhold":
            pins.add_waiter(pin, "r")
    for program in programs[2:5]:
        program.priority_class = 5
    for pin in list(pins):
        if action == "hold":
            pins.add_waiter(pin, "r")
        elif action == "unhold":
            pins.remove_waiter(pin, "r")
        pins.remove(pin)
    assert (len(pins), pins.kv_blocks, list(pins.victims())) == (0, 0, [])


def test_victims_may_be_removed_or_shrunk_while_they_are_named():
    pins = PinTable()
    for seq in range(1, 6):
        add(pins, make_program(seq))
    seen = []
    for pin in pins.victims():
        seen.append(pin.pin_id)
        if pin.pin_id % 2:
            pins.remove(pin)
        else:
            pins.shrink(pin, kv_blocks=1, kv_tokens=4)
    assert seen == [5, 4, 3, 2, 1]
    assert ids(pins.victims()) == [4, 2]
    assert pins.kv_blocks == 2


def test_shrinking_is_counted():
    pins = PinTable()
    pin, other = add(pins, make_program(1), blocks=5), add(pins, make_program(2))
    pins.shrink(pin, kv_blocks=3, kv_tokens=12)
    assert (pin.kv_blocks, pin.kv_tokens) == (3, 12)
    assert pins.kv_blocks == 5
    pins.remove(pin)
    pins.remove(other)
    assert pins.kv_blocks == 0


def test_ids_are_never_used_twice():
    pins, program = PinTable(), make_program(1)
    first = add(pins, program)
    pins.remove(first)
    assert add(pins, program).pin_id != first.pin_id


def test_a_share_is_an_equal_part_for_who_has_nothing_yet_too():
    pins = PinTable()
    made = {}
    for seq, (tenant, blocks) in enumerate({"red": 12, "blue": 4}.items()):
        assert not any(pins.is_over_share(each, 10, each) for each in made)  # alone
        program = make_program(seq)
        program.tenant = tenant
        made[tenant] = add(pins, program, blocks=blocks)
    assert pins.is_over_share("red", 10, "blue")
    assert not pins.is_over_share("blue", 10, "red")
    assert pins.is_over_share("blue", 10, "green")  # a third of ten
    pins.shrink(made["red"], kv_blocks=5, kv_tokens=20)
    assert not pins.is_over_share("red", 10, "blue")
    pins.remove(made["red"])
    assert not pins.is_over_share("blue", 3, "blue")
