"""`bench demote`: what its table says of the rounds."""

from __future__ import annotations

from types import SimpleNamespace

from bench.compare.demote import modes_table


def arm(down, reloaded, claimed):
    engine = SimpleNamespace(
        tier_bytes={"demoted": down} if down else {},
        reloaded_tokens={"cpu": reloaded},
        pins={"claimed": claimed},
    )
    return SimpleNamespace(engine=engine)


def test_bytes_down_stand_by_round_and_the_rest_as_means():
    done = [
        {"write-through": arm(100e6, 10, 4), "none": arm(0, 0, 5)},
        {"write-through": arm(60.4e6, 30, 2), "none": arm(0, 0, 5)},
    ]
    found = modes_table(done, ("write-through", "none"))
    cells = [list(column.cells) for column in found.columns]
    assert cells[1] == ["100.0 60.4", "0.0 0.0"]
    assert [cells[3], cells[4]] == [["20", "0"], ["3", "5"]]
