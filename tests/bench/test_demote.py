"""`bench demote`: what its table says of the rounds."""

from __future__ import annotations

from types import SimpleNamespace

from bench.compare.demote import ratios


def arm(jct_s, down):
    return SimpleNamespace(
        summary=SimpleNamespace(mean_jct_s=jct_s),
        engine=SimpleNamespace(tier_bytes={"demoted": down}),
    )


def test_each_round_is_compared_with_its_own():
    results = {
        "none": [arm(30.0, 0), arm(30.0, 0), arm(30.0, 0)],
        "write-through": [arm(10.0, 100), arm(20.0, 100), arm(40.0, 100)],
        "on-pressure": [arm(9.0, 50), arm(22.0, 60), arm(40.0, 70)],
    }
    (line,) = ratios(results)
    assert line == (
        "on-pressure of write-through, round by round: bytes down 0.60x (0.50, 0.60, "
        "0.70), mean JCT 1.00x (0.90, 1.10, 1.00)"
    )


def test_rounds_without_a_pair_and_an_arm_without_bytes():
    assert ratios({"on-pressure": [arm(1.0, 1)]}) == []
    results = {"write-through": [arm(1.0, 0)], "on-pressure": [arm(1.0, 1)]}
    assert "bytes down nanx" in ratios(results)[0]
