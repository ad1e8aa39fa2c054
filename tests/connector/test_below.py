"""What one may trust to be below."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("lmcache", reason="the matrix of vLLM versions has no LMCache")

from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata
from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from ttlcache_connector.tiers.lmcache.stored_index import Below, chunk_bytes

CHUNK, BLOCK = 64, 32
HASHES = [bytes([i]) for i in range(12)]  # six chunks and nothing more


@pytest.fixture
def below():
    below = Below(CHUNK, BLOCK)
    below.trust(cpu_bytes=200, chunk_bytes=10)  # ten chunks
    return below


def known(below):
    """Which chunks of HASHES."""
    return [i // 2 for i in range(1, 12, 2) if HASHES[i] in below]


def test_what_a_lookup_found_is_there_and_what_it_missed_is_not(below):
    below.found(HASHES, 0, 6 * CHUNK)
    assert known(below) == [0, 1, 2, 3, 4, 5]
    below.found(HASHES, 2 * CHUNK, 4 * CHUNK)
    assert known(below) == [0, 1, 2, 3], "of what lies before it says nothing"
    below.found(HASHES[:7], 2 * CHUNK, 0)
    assert known(below) == [0, 1, 3], "nor of what lies behind"
    below.clear()
    assert len(below) == 0


def pool_of(block_hashes):
    return SimpleNamespace(
        blocks=[
            SimpleNamespace(
                block_hash=None
                if h is None
                else make_block_hash_with_group_id(BlockHash(h), 0)
            )
            for h in block_hashes
        ]
    )


def orders(*request_ids):
    """The first two chunks, of each."""
    op = LoadStoreOp(token_ids=[], block_ids=[[0, 1, 2, 3]], start=0, end=2 * CHUNK)
    return {r: LMCacheMPRequestMetadata(r, "STORE", op) for r in request_ids}


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_copy_counts_when_it_ended_well(below, is_lost):
    below.copies_begin(orders("a", "c"), pool_of(HASHES))
    assert known(below) == []
    below.copy_ended("a", is_lost=is_lost)
    below.copy_ended("a", is_lost=False)  # no such copy
    assert known(below) == ([] if is_lost else [0, 1])


def test_what_was_computed_before_a_reset_does_not_count(below):
    """Nor does what such a request stores after it: under its old salt."""
    below.copies_begin(orders("a"), pool_of(HASHES))
    below.reset(["a", "b"])
    below.copies_begin(orders("b"), pool_of(HASHES))
    for request_id in ("a", "b"):
        below.copy_ended(request_id, is_lost=False)
    assert known(below) == []
    below.copies_begin(orders("c"), pool_of(HASHES))
    below.copy_ended("c", is_lost=False)
    assert known(below) == [0, 1]


def test_a_block_that_has_no_name_is_left_out(below):
    pool = pool_of([*HASHES[:3], None])
    below.copies_begin(orders("a"), pool)
    below.copy_ended("a", is_lost=False)
    assert known(below) == [0]


def test_no_more_is_trusted_than_half_of_the_servers_memory_holds(below):
    names = [bytes([100 + i]) for i in range(24)]
    below.found(names, 0, 8 * CHUNK)
    below.found(HASHES, 0, 4 * CHUNK)  # those least recently used were evicted
    assert [names[2 * i + 1] in below for i in range(8)] == [False] * 2 + [True] * 6
    below.found(names, 2 * CHUNK, 8 * CHUNK)
    below.trust(cpu_bytes=120, chunk_bytes=10)
    assert known(below) == []
    assert len(below) == 6


def test_a_server_that_does_not_say_is_not_trusted():
    below = Below(CHUNK, BLOCK)
    below.found(HASHES, 0, 4 * CHUNK)
    assert len(below) == 0
    below.trust(0, 10)
    below.found(HASHES, 0, 4 * CHUNK)
    assert len(below) == 0


def test_a_chunk_is_as_large_as_what_all_ranks_store_of_it():
    spec = SimpleNamespace(block_size=16, page_size_bytes=1000)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b", "c"])
    config = SimpleNamespace(kv_cache_groups=[group])
    assert chunk_bytes(config, 64, ranks=2) == 4 * 1000 * 3 * 2
    spec.kv_cache_specs = {"a": None, "b": None, "c": None}  # the sum over them
    assert chunk_bytes(config, 64, ranks=2) == 4 * 1000 * 2
