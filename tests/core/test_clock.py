import pytest

from ttlcache.clock import (
    SystemClock,
    VirtualClock,
    default_clock,
    use_clock,
)


def test_use_clock_nests_and_restores():
    before = default_clock()
    assert isinstance(before, SystemClock)
    outer, inner = VirtualClock(), VirtualClock()
    with use_clock(outer) as clock:
        assert clock is default_clock() is outer
        with use_clock(inner):
            assert default_clock() is inner
        with pytest.raises(RuntimeError), use_clock(inner):
            raise RuntimeError
        assert default_clock() is outer
    assert default_clock() is before
