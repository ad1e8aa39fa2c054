"""What a turn costs the LMCache server in CPU time, while it holds the tier's lock."""

from __future__ import annotations

import logging

import pytest

from tests.lmcache.tier_load import TierLoad, percentile_s

log = logging.getLogger(__name__)


@pytest.mark.speed
@pytest.mark.parametrize("has_l2", [False, True])
def test_a_turn_costs_the_same_with_3000_programs(has_l2: bool) -> None:
    p99_ms: dict[tuple[str, int], float] = {}
    for programs in (300, 1000, 3000):
        load = TierLoad(programs, has_l2=has_l2)
        load.run(3 * programs)
        load.cpu_s.clear()
        load.run(2000)
        for name, values in sorted(load.cpu_s.items()):
            p99_ms[name, programs] = 1e3 * percentile_s(values, 0.99)
            p50_ms = 1e3 * percentile_s(values, 0.5)
            log.info(
                "%d programs, %s: p50 %.3f ms, p99 %.3f ms",
                programs,
                name,
                p50_ms,
                p99_ms[name, programs],
            )
        assert load.hits > 0.5 * load.wanted
    for name in ("lookup", "admit", "ended", "context"):
        assert p99_ms[name, 3000] < 2.0, name
        assert p99_ms[name, 3000] < 4.0 * p99_ms[name, 300], name
