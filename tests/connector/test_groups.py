"""What memory a request lacks, where vLLM does not count plain blocks of tokens."""

from __future__ import annotations

from dataclasses import replace

from vllm.v1.structured_output import StructuredOutputManager

from bench.sim.harness import (
    EngineSpec,
    build_kv_cache_config,
    build_vllm_config,
)
from tests.connector.conftest import HOLD_5S, HOLD_ALL, free, pinned


def pin_others(engine, count, tokens=60):
    for index in range(count):
        first = 1000 * (index + 1)
        hints = {"program_id": f"other-{index}", "tool": "x"}
        engine.turn(f"other-{index}", range(first, first + tokens), hints=hints)


def first_turn(engine, program, prompt=range(10)):
    engine.turn(f"{program}-1", prompt, hints={"program_id": program, "tool": "x"})


def test_a_state_computed_in_this_step_is_no_lack_of_memory(make_engine):
    engine = make_engine(num_blocks=200, mamba_mode="align", extra_config=HOLD_ALL)
    first_turn(engine, "A")
    pin_others(engine, 8)
    pins = len(engine.controller.pins)
    prompt = range(20_000, 20_130)
    for child in ("child-1", "child-2"):
        engine.add(child, prompt, hints={"program_id": child, "parent_id": "A"})
    engine.step()
    # vLLM lets the second one wait for the first one's state.
    assert [r.request_id for r in engine.scheduler.waiting] == ["child-2"]
    assert len(engine.controller.pins) == pins
    engine.run()
    assert len(engine.controller.pins) >= pins


def test_a_window_needs_no_more_than_it_spans(make_engine):
    engine = make_engine(
        num_blocks=165,
        sliding_window=48,
        max_num_batched_tokens=128,
        extra_config=HOLD_ALL,
    )
    first_turn(engine, "A", range(30_000, 30_032))
    engine.controller.memory.release_all()
    pin_others(engine, 16)
    engine.add("run", range(30), max_tokens=60)
    engine.step()
    assert pinned(engine) == 80
    spare = free(engine)
    # 82 blocks of the full group, 12 of the window's: not 164.
    engine.add("A-2", range(30_000, 31_300), hints={"program_id": "A"})
    engine.step()
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
    ledger = scheduler.connector.scheduler_role.parts.holder
    blocks = scheduler.kv_cache_manager.block_pool.get_new_blocks(3)
    for block in blocks:
        block._block_hash = b"hashed"
    assert ledger.candidate(([b.block_id for b in blocks],)).kv_tokens == 96
