"""Which of a client's values go on, and the reason of those that do not."""

from __future__ import annotations

import math

import pytest

from ttlcache.programs import client_values as values
from ttlcache.programs.client_values import MAX_INT, MAX_NESTED_SIZE, fitting

SCALARS = (
    *(values.client_id, values.header_id, values.client_flag, values.client_tools),
    *(values.client_seconds, values.client_priority, values.client_number),
    *(values.header_flag, values.client_salt),
)
JUNK = (
    *(None, True, 0, -1, MAX_INT, MAX_INT + 1, -(1 << 63) - 1, 10**5000),
    *(math.nan, math.inf, 1e308, "", " ", "x", "x" * 1_000_000, "\ud800", "a\x00\n"),
    *("é", [], {}, ["x"] * 1000, {"a": 1}, b"x", object()),
)


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize("read", SCALARS, ids=lambda read: read.__name__)
def test_whatever_comes_is_bounded_or_refused_for_a_known_reason(read):
    refused = set()
    for junk in (*JUNK, nested(10_000)):
        try:
            found = read(junk)
        except values.UnfitValueError as unfit:
            refused.add(str(unfit))
            continue
        for part in found if isinstance(found, tuple) else (found,):
            if isinstance(part, str):
                assert len(part.encode()) <= 4 * values.MAX_SALT_CHARS
            else:
                assert abs(part) <= values.MAX_SECONDS
    assert refused
    assert refused <= set(values.UNFIT_REASONS)


def test_what_fits_goes_on_as_it_is():
    told = {
        "remote_block_ids": list(range(100_000)),
        "deep": nested(values.MAX_DEPTH),
        "odd": [math.nan, 1 << 70, None, True, "é", {"a": ()}],
    }
    assert fitting(told) == (told, [])
    assert values.header_flag(" True ") is True
    assert values.holds_wide_int(told)


@pytest.mark.parametrize(
    ("reason", "entry"),
    [
        ("nested_too_deep", {"x": nested(values.MAX_DEPTH + 1)}),
        ("nested_too_deep", {"x": nested(100_000)}),
        ("nested_too_large", {"x": "y" * MAX_NESTED_SIZE}),
        ("nested_too_large", {"y" * MAX_NESTED_SIZE: 1}),
        ("nested_too_large", {"x": [0] * MAX_NESTED_SIZE}),
        ("nested_too_large", {"x": [[0] * 100_000] * 100_000}),
        ("nested_encoding", {"x": "\ud800"}),
        ("nested_encoding", {"\udc00": 1}),
        ("nested_encoding", {"x": [{"y": {"\ud800": 1}}]}),
    ],
)
def test_what_does_not_fit_stays_and_takes_nothing_with_it(reason, entry):
    assert fitting({"a": 1, **entry, "b": "c"}) == ({"a": 1, "b": "c"}, [reason])


def test_all_entries_together_are_bounded():
    told = {str(n): "x" * (MAX_NESTED_SIZE // 4) for n in range(10)}
    kept, reasons = fitting(told)
    assert len(kept) == 3
    assert set(reasons) == {"nested_too_large"}
