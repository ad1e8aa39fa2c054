"""Run by test_kv_round_trip.py in a process of its own: vLLM's CPU worker, our mover.

Prints JSON: greedy token ids of a prompt with a warm prefix cache after its blocks
(a) stayed, (b) went to chunks, were zeroed and came back into the same blocks,
(c) were zeroed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from vllm import LLM, SamplingParams, TokensPrompt

from bench.serve import tiny_model
from ttlcache_connector.copy.block_copier import BlockCopier
from ttlcache_connector.copy.kv_layouts import read_layout

PER_CHUNK = 4


def main(folder: str) -> None:
    model = tiny_model.build(Path(folder) / "model")
    llm = LLM(
        str(model),
        max_model_len=1024,
        max_num_seqs=2,
        num_gpu_blocks_override=16,
        enable_prefix_caching=True,
        enforce_eager=True,
        gpu_memory_utilization=0.05,  # of the machine; the pool is 16 blocks
        seed=0,
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    config = runner.kv_cache_config
    names = config.kv_cache_groups[0].layer_names
    context = runner.compilation_config.static_forward_context
    caches = {}
    for name in names:
        cache = context[name].kv_cache
        caches[name] = cache[0] if isinstance(cache, list | tuple) else cache
    group = read_layout(caches, config)
    copier = BlockCopier.make(caches, config)

    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(10, 2000, (700,), generator=generator).tolist()
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def ask() -> tuple[list[int], int]:
        (result,) = llm.generate(TokensPrompt(prompt_token_ids=prompt), greedy)
        return list(result.outputs[0].token_ids), int(result.num_cached_tokens or 0)

    ask()
    stayed = ask()
    buffer = torch.empty(0, dtype=torch.uint8).set_(caches[names[0]].untyped_storage())
    before = buffer.clone()
    blocks = list(range(config.num_blocks))
    nbytes = group.layout.chunk_bytes(PER_CHUNK)
    chunks = [
        torch.zeros((1, PER_CHUNK, nbytes // PER_CHUNK), dtype=torch.uint8)
        for _ in range(-(-len(blocks) // PER_CHUNK))
    ]
    copier.gather(blocks, PER_CHUNK, chunks)
    buffer.zero_()
    copier.scatter(blocks, PER_CHUNK, chunks)
    exact = torch.equal(buffer, before)
    returned = ask()
    buffer.zero_()
    zeroed = ask()
    copier.close()
    report = {
        "layout": group.layout.name,
        "block_bytes": group.layout.block_bytes,
        "exact": exact,
        "stayed": stayed,
        "returned": returned,
        "zeroed": zeroed,
    }
    print(json.dumps(report))  # noqa: T201


main(sys.argv[1])
