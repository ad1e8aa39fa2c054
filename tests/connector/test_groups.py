"""What memory a request lacks, where vLLM does not count plain blocks of tokens."""

from dataclasses import replace

import pytest
from vllm.v1.structured_output import StructuredOutputManager

from tests.connector.conftest import HOLD_5S, HOLD_ALL, begin, free, pinned, start
from ttlcache_sim.harness import EngineSpec, build_kv_cache_config, build_vllm_config


def pin_others(engine, count):
    for index in range(count):
        start(engine, f"other{index}", 60, base=index + 1, max_tokens=4)
        engine.run()


def test_a_hybrid_turn_is_pinned_whole_or_not_at_all(make_engine):
    engine = make_engine(
        num_blocks=80,
        sliding_window=48,
        extra_config={**HOLD_ALL, "max_pinned_fraction": 0.25},
    )
    start(engine, "A", 400)
    engine.run()
    assert pinned(engine) == 0
    assert free(engine) == 79


def test_a_state_computed_in_this_step_is_no_lack_of_memory(make_engine):
    engine = make_engine(num_blocks=200, mamba_mode="align", extra_config=HOLD_ALL)
    start(engine, "A", 10)
    engine.run()
    pin_others(engine, 8)
    pins = len(engine.controller.pins)
    for child in ("child1", "child2"):
        start(engine, child, 130, base=20, max_tokens=4, parent_id="A")
    engine.step()
    # vLLM lets the second one wait for the first one's state.
    assert [r.request_id for r in engine.scheduler.waiting] == ["child2-1"]
    assert len(engine.controller.pins) == pins
    engine.run()
    assert len(engine.controller.pins) >= pins


@pytest.mark.parametrize(
    ("group", "pins"), [({"sliding_window": 48}, 16), ({"mamba_mode": "align"}, 20)]
)
def test_other_groups_need_no_more_than_they_hold_at_a_time(make_engine, group, pins):
    engine = make_engine(
        num_blocks=165, max_num_batched_tokens=128, extra_config=HOLD_ALL, **group
    )
    start(engine, "A", 32, base=30)
    engine.run()
    engine.controller.memory.release_all()
    pin_others(engine, pins)
    engine.add("run", range(30), max_tokens=60)
    engine.step()
    assert pinned(engine) == 80
    spare = free(engine)
    # 82 blocks of the full group, 12 at most of the other: not 164.
    begin(engine, "A", 1300, base=30, turn=2)
    assert not engine.scheduler.waiting
    assert 80 - pinned(engine) <= 82 + 12 - spare + 10


def test_ranks_of_decode_context_parallelism_share_a_block(clock):
    spec = replace(EngineSpec(), extra_config=HOLD_5S)
    config = build_vllm_config(spec)
    config.parallel_config.decode_context_parallel_size = 2
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=build_kv_cache_config(spec),
        structured_output_manager=StructuredOutputManager(config),
        block_size=32,
        hash_block_size=32,
        log_stats=False,
    )
    holder = scheduler.connector.scheduler_role.parts.holder
    blocks = scheduler.kv_cache_manager.block_pool.get_new_blocks(3)
    for block in blocks:
        block._block_hash = b"hashed"
    assert holder.candidate(([b.block_id for b in blocks],)).kv_tokens == 96


def test_a_turn_with_recurrent_layers_is_pinned_with_its_last_cached_state(make_engine):
    engine = make_engine(num_blocks=60, mamba_mode="align", extra_config=HOLD_ALL)
    first = start(engine, "A", 400)
    engine.run()
    assert pinned(engine) == 400 // 16 + 1  # attention and one state
    for other in "BCD":  # each takes almost all that is free
        start(engine, other, 450, is_last_step=True)
        engine.run()
    context = [*first.all_token_ids, *range(7, 30)]
    engine.add("A-2", context, hints={"program_id": "A"})
    (second,) = engine.step().scheduled_new_reqs
    assert second.num_computed_tokens == 400


@pytest.mark.parametrize("end", ["finished", "aborted", "preempted", "reset"])
def test_states_of_running_requests_are_not_given_up(
    make_engine, async_scheduling, end
):
    engine = make_engine(
        num_blocks=200,
        mamba_mode="align",
        extra_config=HOLD_ALL,
        async_scheduling=async_scheduling,
    )
    request = start(engine, "A", 40, max_tokens=60)
    states, is_newest = engine.holder.states, []
    while request.num_output_tokens < 50:
        engine.step()
        newest = [b.block_id for b in states.cached_prefix(request)[1] if not b.is_null]
        is_newest.append([*states.refs] == newest)
    # Of each block of 16 tokens: cached in one step, referenced before the next.
    assert sum(is_newest) >= len(is_newest) * 3 // 4
    assert is_newest[-1]
    if end == "finished":
        engine.run()
    elif end == "aborted":
        engine.abort(request.request_id)
    elif end == "reset":
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    else:
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.run()
    assert not states.refs
