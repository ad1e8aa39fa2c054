"""Which of a client's values go on, and the reason of those that do not."""

from __future__ import annotations

import math

import pytest

from ttlcache.programs.client_values import (
    MAX_DEPTH,
    MAX_INT,
    MAX_NESTED_SIZE,
    MAX_SALT_CHARS,
    MAX_SECONDS,
    UNFIT_REASONS,
    UnfitValueError,
    client_flag,
    client_id,
    client_number,
    client_priority,
    client_salt,
    client_seconds,
    client_tools,
    fitting,
    header_flag,
    header_id,
)

SCALARS = (
    *(client_id, header_id, client_flag, header_flag, client_tools, client_seconds),
    *(client_priority, client_number, client_salt),
)
JUNK = (
    *(None, True, 0, -1, MAX_INT, MAX_INT + 1, -(1 << 63) - 1, 10**5000),
    *(math.nan, math.inf, 1e308, "", " ", "x", "x" * 1_000_000, "\ud800", "a\x00\n"),
    *("é", [], {}, ["x"] * 1000, {"a": 1}, b"x", object()),
)


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize("read", SCALARS, ids=lambda read: read.__name__)
def test_whatever_comes_is_bounded_or_refused_for_a_known_reason(read):
    refused = set()
    for junk in (*JUNK, nested(10_000)):
        try:
            found = read(junk)
        except UnfitValueError as unfit:
            refused.add(str(unfit))
            continue
        for part in found if isinstance(found, tuple) else (found,):
            if isinstance(part, str):
                assert len(part.encode()) <= 4 * MAX_SALT_CHARS
            else:
                assert abs(part) <= MAX_SECONDS
    assert refused
    assert refused <= set(UNFIT_REASONS)


def test_what_fits_goes_on_as_it_is():
    values = {
        "remote_block_ids": list(range(100_000)),
        "deep": nested(MAX_DEPTH),
        "odd": [math.nan, 1 << 70, None, True, "é", {"a": ()}],
    }
    kept, reasons = fitting(values)
    assert kept == values
    assert reasons == []


@pytest.mark.parametrize(
    ("reason", "entry"),
    [
        ("nested_too_deep", {"x": nested(MAX_DEPTH + 1)}),
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
    values = {str(n): "x" * (MAX_NESTED_SIZE // 4) for n in range(10)}
    kept, reasons = fitting(values)
    assert len(kept) == 3
    assert set(reasons) == {"nested_too_large"}
