from __future__ import annotations

from ttlcache.types import KEY_PART_LIMIT, PARALLEL_TOOL, GapKey


def test_a_gap_key_backs_off_from_fine_to_coarse():
    key = GapKey("bash", "git")
    assert key.backoff() == (key, GapKey("bash"))
    assert GapKey("search").backoff() == (GapKey("search"),)


def test_every_part_of_a_gap_key_is_bounded():
    key = GapKey("a" * 1000, "b" * 1000)
    assert len(str(key)) == 2 * KEY_PART_LIMIT + 1
    many = tuple(GapKey(f"tool-{n}") for n in range(1000))
    assert len(GapKey.parallel(many).executable) == KEY_PART_LIMIT


def test_parallel_calls_have_one_key_whatever_their_order():
    a, b = GapKey("search"), GapKey("bash", "pytest")
    assert GapKey.parallel((a, b)) == GapKey.parallel((b, a, a))
    assert GapKey.parallel((a, b)) == GapKey(PARALLEL_TOOL, "pytest+search")
    assert GapKey.parallel((a,)) == a


def test_a_gap_key_reads_like_a_command():
    assert str(GapKey("bash", "git")) == "bash git"
    assert str(GapKey("search")) == "search"
