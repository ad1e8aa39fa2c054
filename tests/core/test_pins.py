import math

from tests.core.stories import make_program
from ttlcache.programs.model import Turn
from ttlcache.retention.pin_table import PinTable
from ttlcache.types import GapKey


def add(pins, program, blocks=2, ttl_s=10.0, now_s=0.0):
    turn = Turn(1, 0.0, GapKey("tool"), context_tokens=8, hashes=[b"a", b"b"])
    return pins.add(
        program, turn, kv_blocks=blocks, kv_tokens=blocks * 4, now_s=now_s, ttl_s=ttl_s
    )


def test_pins_expire_at_their_deadline_oldest_first():
    pins, program = PinTable(), make_program(1)
    late, soon, same = (add(pins, program, ttl_s=t) for t in (9.0, 3.0, 3.0))
    add(pins, program, ttl_s=math.inf)
    assert pins.next_deadline_s() == 3.0
    assert pins.expired(2.9) == []
    assert pins.expired(3.0) == [soon, same]
    assert pins.expired(1e300) == [soon, same, late]
    for pin in (soon, same):
        pins.remove(pin)
    assert pins.next_deadline_s() == 9.0


def test_an_awaited_pin_does_not_expire_until_nobody_waits():
    pins = PinTable()
    pin = add(pins, make_program(1), ttl_s=3.0)
    pins.add_claimant(pin, "r")
    pins.set_deadline(pin, 4.0)
    pins.remove_claimant(pin, "another")
    assert pins.expired(99.0) == []
    pins.remove_claimant(pin, "r")
    assert pins.expired(3.9) == []
    assert pins.expired(4.0) == [pin]


def test_victims_are_the_latest_programs_first_and_awaited_pins_last():
    pins, old, young = PinTable(), make_program(1), make_program(2)
    of_old, first, second = add(pins, old), add(pins, young), add(pins, young)
    assert list(pins.in_eviction_order()) == [second, first, of_old]
    pins.add_claimant(second, "r")
    assert list(pins.in_eviction_order()) == [first, of_old, second]
    pins.remove_claimant(second, "r")
    assert list(pins.in_eviction_order()) == [second, first, of_old]


def test_a_lower_class_goes_before_a_higher_one():
    pins = PinTable()
    high = add(pins, make_program(3, priority_class=1))
    low = add(pins, make_program(1, priority_class=-1))
    normal = add(pins, make_program(2))
    # The class is that of the turn: no pin is lost when its program changes it.
    low.program.priority_class = 5
    assert list(pins.in_eviction_order()) == [low, normal, high]
    pins.add_claimant(low, "r")
    pins.remove_claimant(low, "r")
    pins.remove(low)
    assert list(pins.in_eviction_order()) == [normal, high]


def test_a_share_is_an_equal_part_for_who_has_nothing_yet_too():
    pins = PinTable()
    made = {}
    for seq, (tenant, blocks) in enumerate({"red": 12, "blue": 4}.items()):
        assert not any(pins.is_over_share(each, 10, each) for each in made)  # alone
        made[tenant] = add(pins, make_program(seq, tenant=tenant), blocks=blocks)
    assert pins.is_over_share("red", 10, "blue")
    assert not pins.is_over_share("blue", 10, "red")
    assert pins.is_over_share("blue", 10, "green")  # a third of ten
    pins.shrink(made["red"], kv_blocks=5, kv_tokens=20)
    assert not pins.is_over_share("red", 10, "blue")
    pins.remove(made["red"])
    assert not pins.is_over_share("blue", 3, "blue")
