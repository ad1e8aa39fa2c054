"""One tenant floods the pins; the others keep their equal part."""

from __future__ import annotations

from tests.connector.conftest import FOREVER, pinned, totals

FLOOD = {**FOREVER, "max_ttl_s": 1e6}


def flood(engine, sessions: int, tenant: str = "evil", first: int = 0) -> None:
    """Sessions that each want to keep 6 blocks for ever."""
    for index in range(first, first + sessions):
        engine.turn(
            f"{tenant}-{index}",
            range(10 * index, 10 * index + 99),
            hints={"program_id": f"{tenant}-{index}", "ttl": 1e9, "tool": "sleep"},
            cache_salt=tenant,
        )
        engine.finished.clear()  # the harness's own memory, not the engine's


def agent(engine, turns: int, tenant: str = "good") -> int:
    """An agent of another tenant; returns the prompt tokens it had to compute."""
    context = list(range(50_000, 50_060))
    computed, cached = 0, {}
    controller = engine.connector.scheduler_role.parts.controller
    on_allocated = controller.on_allocated
    controller.on_allocated = lambda request_id, tokens: (
        cached.setdefault(request_id, tokens),
        on_allocated(request_id, tokens),
    )
    for turn in range(turns):
        request = engine.add(
            f"{tenant}-{turn}",
            context,
            hints={"program_id": "agent", "tool": "ls"},
            cache_salt=tenant,
        )
        engine.step()
        computed += len(context) - cached.get(request.request_id, 0)
        engine.run()
        context = [*request.all_token_ids, *range(7, 27)]
        flood(engine, 2, first=1000 + 10 * turn)
    return computed


def test_a_flood_does_not_cost_another_tenant_its_kv(make_engine):
    calm = make_engine(num_blocks=100, extra_config=FLOOD)
    quiet = agent(calm, 6)
    stormy = make_engine(num_blocks=100, extra_config=FLOOD)
    flood(stormy, 100)
    assert pinned(stormy) <= 0.9 * 99
    under_flood = agent(stormy, 6)
    # The same tokens are computed: every turn found all full blocks of its context.
    assert under_flood == quiet
    assert totals(stormy)["pins:claimed"] == 5


def test_a_small_tenant_gets_its_part_of_a_cap_that_another_filled(make_engine):
    engine = make_engine(num_blocks=100, extra_config=FLOOD)
    flood(engine, 30)
    assert pinned(engine) > 80
    flood(engine, 20, tenant="other", first=500)
    held = engine.controller.pins._tenant_blocks
    # Two tenants share 89 blocks; nobody is more than a pin above the half.
    assert abs(held["evil"] - held["other"]) <= 12
    assert pinned(engine) <= 89


def test_a_waiting_tenant_takes_what_another_holds_beyond_its_part(make_engine):
    engine = make_engine(
        num_blocks=60, extra_config={**FLOOD, "max_pinned_fraction": 1.0}
    )
    flood(engine, 20)
    engine.add("run", range(30), max_tokens=40, cache_salt="third")
    engine.step()
    engine.add("big", range(400), max_tokens=4, cache_salt="good")
    for _ in range(5):
        engine.step()
    assert "big" not in {r.request_id for r in engine.scheduler.waiting}
