"""`bench disk-tier`, small: both adapters as LMCache's factory makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="LMCache is an extra")

from bench.compare import disk_tier
from bench.compare.disk_tier import COLD_LOAD, LOAD, STORE, UNVERIFIED, VERIFIED


def test_both_arms_give_every_byte_back_and_only_one_sees_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = disk_tier.Shape(objects=8, object_bytes=1 << 16)
    bench = disk_tier.Bench(shape, tmp_path, cold=True)
    try:
        found = bench.rounds(2)
        assert {arm: set(by) for arm, by in found.items()} == {
            arm: {STORE, LOAD, COLD_LOAD} for arm in (VERIFIED, UNVERIFIED)
        }
        assert len(disk_tier.ratio(found, LOAD, "cpu_s").by_round) == 2

        def flip(folder: Path) -> None:
            for path in folder.rglob("*"):
                if path.is_file() and path.stat().st_size > shape.object_bytes // 2:
                    with path.open("r+b") as file:
                        file.seek(1 << 15)
                        data = file.read(1 << 12)
                        file.seek(1 << 15)
                        file.write(bytes(byte ^ 0xFF for byte in data))

        monkeypatch.setattr(disk_tier, "forget_pages", flip)
        with pytest.raises(RuntimeError, match="was not loaded"):
            bench.one(VERIFIED)
        # Why it is not what serve-tiers starts; should LMCache mend it, look again.
        with pytest.raises(RuntimeError, match="other bytes came back"):
            bench.one(UNVERIFIED)
    finally:
        bench.close()
